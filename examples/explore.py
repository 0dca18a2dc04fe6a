"""What does the model do with my text, seen in a browser?

A page shows what is computed between a prompt and its next token: the tokens, the likeliest next
token after every layer (logit lens), any head's attention, what temperature, top-k and top-p leave
of the prediction. "Next token" draws one and feeds it alone: all before it is in the cache. Every
number comes from a function of llm_inference.py, on your machine.

    python -m examples.explore                        then open the address that it prints
    http://127.0.0.1:8001/?prompt=Rome+is&lang=zh     with that prompt read, in Chinese

The numbers: inside.py. The page: explore.html, in English and Chinese, nothing from elsewhere.
"""

import json
import socket
import webbrowser
from pathlib import Path
from typing import Annotated

import fastapi
import uvicorn
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from starlette.middleware.trustedhost import TrustedHostMiddleware

import llm_inference as llm
from examples.common import model_name
from examples.inside import Explorer

PAGE = Path(__file__).with_suffix(".html")


class Prompt(BaseModel):
    prompt: Annotated[str, Field(max_length=20_000)]


class Head(BaseModel):
    text: str
    layer: Annotated[int, Field(ge=0)]
    head: Annotated[int, Field(ge=0)]


class Draw(BaseModel):
    text: str
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0

    def flags(self):
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


def build_app(explorer):
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    # A page of another site cannot reach this one under a name of its own.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])

    @app.get("/")
    def page():
        return FileResponse(PAGE)

    @app.post("/read")
    def read(question: Prompt):
        name = explorer.begin(question.prompt)
        return StreamingResponse(lines(explorer, name), media_type="application/x-ndjson")

    @app.post("/attention")
    def attention(question: Head):
        with explorer.lock:
            return {"rows": explorer.attention(question)}

    @app.post("/next")
    def candidates(question: Draw):
        with explorer.lock:
            return explorer.next(question)

    @app.post("/step")
    def step(question: Draw):
        with explorer.lock:
            return explorer.step(question)

    @app.exception_handler(ValueError)
    def refused(http, error):
        return JSONResponse({"error": str(error)}, 400)

    @app.exception_handler(fastapi.exceptions.RequestValidationError)
    def misunderstood(http, error):
        wrong = error.errors()[0]
        return JSONResponse({"error": f"{wrong['loc'][-1]}: {wrong['msg']}"}, 400)

    return app


def lines(explorer, name):
    """A line of JSON at once for the text, then one for each layer as soon as it is computed."""
    text = explorer.texts[name]
    _, config = explorer.model
    numbers = 2 * explorer.layers * config["num_key_value_heads"] * config["head_dim"]
    yield as_line(
        {
            "text": name,
            "model": explorer.name,
            "tokens": [explorer.token(token_id) for token_id in text.waiting],
            "layers": explorer.layers,
            "heads": explorer.heads,
            "cache_bytes": numbers * text.cache[0][0].itemsize,  # for each token
        }
    )
    layers = explorer.feed(text)
    try:
        for layer in range(explorer.layers):
            with explorer.lock:
                rows = next(layers)
            yield as_line({"layer": layer, "rows": rows})
        with explorer.lock:
            next(layers, None)  # its end
    except ValueError as error:  # the line that says 200 is out already
        yield as_line({"error": str(error)})


def as_line(content):
    return json.dumps(content) + "\n"


def main():
    parser = llm.argument_parser(
        "Open a page that shows what the model computes. Example: python -m examples.explore"
    )
    parser.add_argument(
        "--port", type=llm.ranged(int, 0, 65535), default=8001, help="(%(default)s)"
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open the page")
    args = parser.parse_args()
    try:
        listener = socket.create_server(("127.0.0.1", args.port))
    except OSError as error:
        raise ValueError(f"--port {args.port}: {error.strerror}") from None
    args.model = str(llm.find_model(args.model).resolve())
    explorer = Explorer(model_name(Path(args.model)), *llm.load_model(args), seed=args.seed)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    llm.note(f"Open {address} (Ctrl-C ends)")
    if not args.no_browser:
        webbrowser.open(address)
    config = uvicorn.Config(build_app(explorer), log_level="critical", lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    llm.run(main)
