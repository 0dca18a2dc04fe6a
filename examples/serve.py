"""How does a model become a service?

A program that speaks the OpenAI interface, so that any client of it works: chat windows, editors,
the `openai` package. A request becomes token ids and a place in the engine (engine.py); its answer
goes back in one piece, or piece by piece as it is made (server-sent events).

    python -m examples.serve --model tests/Qwen3-mini
    curl localhost:8000/v1/completions -d '{"prompt": "The capital of France is", "max_tokens": 9}'

The interface: platform.openai.com/docs/api-reference
"""

import asyncio
import hmac
import json
import queue
import signal
import socket

import fastapi
import uvicorn
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

import llm_inference as llm
from examples import openai_api
from examples.chat_template import ChatTemplate
from examples.common import encode, model_name
from examples.engine import Engine, Job
from examples.openai_api import Chat, Completion, Refusal, choice, read_request
from examples.sequence import Sequence

KEPT_TOKENS = 4096  # of ended requests stay in the cache, for others that begin alike
GRACE = 10  # seconds that running answers get when the server is stopped


class Service:
    """The model, and what a request leaves open: the flags, else the checkpoint's own settings."""

    def __init__(self, args):
        folder = llm.find_model(args.model)
        args.model = str(folder)
        self.weights, self.config, self.tokenizer = llm.load_model(args)
        self.name = model_name(folder.resolve())
        path = folder / "generation_config.json"
        settings = json.loads(path.read_bytes()) if path.exists() else {}
        if not settings.get("do_sample"):
            settings["temperature"] = 0.0
        usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": None}
        self.defaults = {name: settings.get(name, usual[name]) for name in usual}
        for name, value in llm.options(args).items():
            if value is not None:
                self.defaults[name] = value
        self.templates = {}
        self.why_no_chat = ""
        stop = set(self.config["eos_token_id"])
        try:
            for think in (False, True):
                self.templates[think] = ChatTemplate(folder, self.tokenizer, think)
                stop |= self.templates[think].end_of_turn
        except ValueError as error:
            self.why_no_chat = str(error)
        self.engine = Engine(self.weights, self.config, stop, args.slots, args.queue, KEPT_TOKENS)

    def chat_ids(self, request):
        if self.why_no_chat:
            raise Refusal(400, self.why_no_chat, "messages")
        template = self.templates[request.chat_template_kwargs.enable_thinking]
        messages = []
        for message in request.messages:
            role = "system" if message.role == "developer" else message.role
            content = message.content
            if not isinstance(content, str):
                content = "".join(part.text for part in content)
            if role == "assistant":  # marks in it are text, but for those of a thought
                content = template.hide(content)
                for mark in ("<think>", "</think>"):
                    content = content.replace(template.hide(mark), mark)
            messages.append({"role": role, "content": content})
        try:
            return template.encode(messages)
        except ValueError as error:
            raise Refusal(400, str(error), "messages") from None

    def start(self, request, ids, limit):
        """Hand a request to the engine. Its events come out of the queue that is returned."""
        draw = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "seed")}
        given = {name: value for name, value in draw.items() if value is not None}
        flags = self.defaults | given | ({"max_tokens": limit} if limit else {})
        sequence = Sequence(ids, self.config, **flags)
        if sequence.error:
            raise Refusal(400, sequence.error, "prompt")
        events = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(kind, value):  # called in the engine's thread
            loop.call_soon_threadsafe(events.put_nowait, (kind, value))

        stops = [request.stop] if isinstance(request.stop, str) else request.stop
        job = Job(sequence, self.tokenizer, [stop for stop in stops if stop], deliver)
        try:
            self.engine.submit(job)
        except queue.Full:
            headers = {"Retry-After": "1"}
            raise Refusal(429, "too many requests are waiting", headers=headers) from None
        return job, events

    async def answer(self, http, request, ids, limit):
        """The response to a request whose prompt has these ids."""
        chat = isinstance(request, Chat)
        job, events = self.start(request, ids, limit)

        def leave(_):  # also after a whole answer, where it does no harm
            job.cancelled = True
            events.put_nowait(("gone", None))

        asyncio.ensure_future(http.receive()).add_done_callback(leave)  # the client has left
        event = await events.get()
        head = openai_api.head(request, self.name)
        if request.stream and event[0] != "error":
            parts = stream(head, job, events, event, chat, request.stream_options.include_usage)
            return StreamingResponse(parts, media_type="text/event-stream")
        text = ""
        kind, value = event
        while kind == "text":
            text += value
            kind, value = await events.get()
        if kind == "error":
            raise Refusal(500, value)
        content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        head["choices"] = [choice(content, value)]
        return JSONResponse(head | {"usage": usage(job)})


async def stream(head, job, events, event, chat, with_usage):
    """The answer as server-sent events, from its first event in the engine on."""
    if with_usage:
        head = head | {"usage": None}
    if chat:
        content = {"delta": {"role": "assistant", "content": ""}}
        yield as_event(head | {"choices": [choice(content, None)]})
    kind, value = event
    while kind == "text":
        content = {"delta": {"content": value}} if chat else {"text": value}
        yield as_event(head | {"choices": [choice(content, None)]})
        kind, value = await events.get()
    if kind == "error":
        yield as_event(openai_api.error_object(500, value))
    if kind == "end":
        content = {"delta": {}} if chat else {"text": ""}
        yield as_event(head | {"choices": [choice(content, value)]})
        if with_usage:
            yield as_event(head | {"choices": [], "usage": usage(job)})
        yield "data: [DONE]\n\n"


def as_event(content):
    return f"data: {json.dumps(content)}\n\n"


def usage(job):
    sequence = job.sequence
    return openai_api.usage(len(sequence.prompt), job.shared, len(sequence.answer))


def build_app(service, key=None, origin=None):
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    if origin:
        app.add_middleware(
            CORSMiddleware, allow_origins=[origin], allow_methods=["*"], allow_headers=["*"]
        )

    def authorize(http):
        given = http.headers.get("authorization", "").encode("latin-1")
        if key and not hmac.compare_digest(given, f"Bearer {key}".encode()):
            raise Refusal(401, "wrong API key: send it as Authorization: Bearer KEY")

    @app.get("/health")
    def health():
        return {"status": "ok"}

    @app.get("/v1/models")
    def models(http: fastapi.Request):
        authorize(http)
        model = {"id": service.name, "object": "model", "created": 0, "owned_by": "local"}
        return {"object": "list", "data": [model]}

    @app.post("/v1/completions")
    async def completions(http: fastapi.Request):
        authorize(http)
        request = await read_request(http, Completion)
        prompt = request.prompt if isinstance(request.prompt, str) else request.prompt[0]
        ids = encode(prompt, service.tokenizer)
        return await service.answer(http, request, ids, request.max_tokens)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: fastapi.Request):
        authorize(http)
        request = await read_request(http, Chat)
        limit = request.max_completion_tokens or request.max_tokens
        return await service.answer(http, request, service.chat_ids(request), limit)

    @app.exception_handler(Refusal)
    def refused(http, error):
        return error.response

    @app.exception_handler(HTTPException)
    def not_found(http, error):
        return Refusal(error.status_code, error.detail).response

    @app.exception_handler(Exception)
    def failed(http, error):
        return Refusal(500, f"the server failed: {error}").response

    return app


def main():
    parser = llm.argument_parser(
        "Serve a model by the OpenAI interface. Example: python -m examples.serve --model FOLDER"
    )
    parser.set_defaults(max_tokens=512, temperature=None, top_k=None, top_p=None)
    flag = parser.add_argument
    flag("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    flag("--port", type=llm.ranged(int, 0, 65535), default=8000, help="(%(default)s)")
    flag("--slots", type=llm.ranged(int, 1), default=16, help="answers at once (%(default)s)")
    flag("--queue", type=llm.ranged(int, 1), default=64, help="may wait (%(default)s)")
    flag("--api-key", help="that every request must bring")
    flag("--allow-origin", help="a web page's origin, or *, that may use the server (CORS)")
    args = parser.parse_args()
    try:
        listener = socket.create_server((args.host, args.port))
    except OSError as error:
        raise ValueError(f"--host {args.host} --port {args.port}: {error.strerror}") from None
    service = Service(args)
    app = build_app(service, args.api_key, args.allow_origin)
    config = uvicorn.Config(
        app, log_level="critical", lifespan="off", timeout_graceful_shutdown=GRACE
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn has its own, and then calls these
        signal.signal(number, lambda *_: None)
    host, port = listener.getsockname()[:2]
    llm.note(f"Serving {service.name} at http://{host}:{port}/v1 (Ctrl-C ends it)")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    llm.run(main)
