"""What do the requests and answers of the OpenAI interface look like?

A field of a request that does not stand here is refused by its name: with it the answer would have
to be another one. Some change nothing at one value, and are accepted with that value alone.

Imported by serve.py. The interface: platform.openai.com/docs/api-reference
"""

import json
import secrets
import time
from typing import Annotated, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

BODY_LIMIT = 4_000_000  # bytes
Positive = Annotated[int, Field(ge=1)]
Zero = Annotated[float, Field(ge=0, le=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False


class Request(Strict):
    """The fields of both kinds of request. What is None the server decides."""

    model: str = None  # any name: there is one model
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Positive = None
    temperature: Annotated[float, Field(ge=0)] = None
    top_p: Annotated[float, Field(ge=0, le=1)] = None
    top_k: Annotated[int, Field(ge=0)] = None
    seed: int = None
    stop: str | list[str] = []
    # What follows changes nothing.
    n: Literal[1] = 1
    presence_penalty: Zero = 0
    frequency_penalty: Zero = 0
    logit_bias: Annotated[dict, Field(max_length=0)] = {}
    user: str = ""


class Completion(Request):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]
    echo: Literal[False] = False
    best_of: Literal[1] = 1


class Part(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None


class TemplateOptions(Strict):
    enable_thinking: bool = False


class Chat(Request):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Positive = None  # the newer name
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    logprobs: Literal[False] = False
    tools: Annotated[list, Field(max_length=0)] = []
    store: bool = False
    metadata: dict = {}


class Refusal(Exception):
    """A request without an answer. param: the field that is wrong."""

    def __init__(self, status, message, param=None, headers=None):
        super().__init__(message)
        self.response = JSONResponse(error_object(status, message, param), status, headers)


def error_object(status, message, param=None):
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


async def read_request(http, kind):
    """The body of an HTTP request, as a Completion or a Chat."""
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > BODY_LIMIT:
            raise Refusal(413, f"the body has more than {BODY_LIMIT} bytes")
    try:
        content = dict(json.loads(body))
        json.dumps(content, ensure_ascii=False).encode()  # half a surrogate pair is no text
        given = {name: value for name, value in content.items() if value is not None}
        return kind.model_validate(given)
    except ValidationError as error:
        wrong = max(error.errors(), key=lambda one: len(one["loc"]))  # the most exact one
        field = ".".join(str(part) for part in wrong["loc"])
        unknown = wrong["type"] == "extra_forbidden"
        message = "this server does not support it" if unknown else wrong["msg"]
        raise Refusal(400, f"{field}: {message}", field) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON object: {error}") from None


def head(request, model):
    """The fields that an answer and all of its pieces have in common."""
    kind = "text_completion"
    if isinstance(request, Chat):
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
    name = f"{'chatcmpl' if isinstance(request, Chat) else 'cmpl'}-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def choice(content, reason):
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


def usage(prompt, cached, answer):
    """Numbers of tokens. cached: of the prompt, those that did not have to be read."""
    counts = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}
