"""examples/serve.py: the OpenAI interface, held to what real clients send and what they suffer."""

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest
import uvicorn
from checkpoints import MINI, make_config, write_checkpoint
from terminal import FRANCE, JAPAN, ROOT, START, assert_one_complaint, environment, run
from test_cli import values

import llm_inference as llm
from examples import batch, common, engine, openai_api, serve
from examples.chat_template import ChatTemplate

MODULE = "examples.serve"
GREEDY = {"temperature": 0, "max_tokens": 12}
HTTP = httpx.Client(timeout=60)  # one for all: a new one takes a while
FLAGS = {"model": str(MINI), "dtype": "float32", "max_tokens": 512, "seed": None, "slots": 4}
FLAGS |= {"temperature": None, "top_p": None, "top_k": None, "queue": 8}


@contextlib.contextmanager
def served(key=None, origin=None, **changes):
    """A server in a thread of this process: its Service, with the address as `.address`."""
    service = serve.Service(argparse.Namespace(**FLAGS | changes))
    with listening(serve.build_app(service, key, origin)) as service.address:
        yield service


@contextlib.contextmanager
def listening(app):
    """The address of an app that runs in a thread of this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def service():
    with served() as service:
        yield service


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A folder with a model whose answers do not end, and steps that take a while."""
    folder = tmp_path_factory.mktemp("endless") / "endless"
    config = make_config(num_hidden_layers=4, eos_token_id=2111, tie_word_embeddings=False)
    write_checkpoint(folder, config)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def client(service):
    url = f"{service.address}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=HTTP)


def post(service, path="completions", **fields):
    return HTTP.post(f"{service.address}/v1/{path}", json=fields)


def alone(service, ids, max_tokens=12, **draw):
    """The answer that generate gives, and why it ended."""
    stop = service.engine.model[2]
    answer = list(llm.generate(ids, service.weights, service.config, stop, max_tokens, **draw))
    text = service.tokenizer.decode(answer, skip_special_tokens=False)
    return text, "length" if len(answer) == max_tokens else "stop"


def encode(service, text):
    return common.encode(text, service.tokenizer)


# ---- Answers


def test_a_completion_is_what_generate_gives(service):
    """Text, reason, numbers of tokens and the model's own name, by the openai package."""
    answer = client(service).completions.create(model="gpt-4", prompt=START, **GREEDY)
    text, reason = alone(service, encode(service, START))
    assert answer.choices[0].text == text and "Paris" in text
    assert answer.choices[0].finish_reason == reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 12, 17)
    assert answer.model == "Qwen3-mini" and answer.object == "text_completion"
    models = client(service).models.list()
    assert [model.id for model in models] == ["Qwen3-mini"]
    assert HTTP.get(f"{service.address}/health").json() == {"status": "ok"}


def test_a_dialogue_is_written_by_the_template(service):
    """All roles; content as text or parts; with and without thinking."""
    parts = [
        {"type": "text", "text": "What is the capital "},
        {"type": "text", "text": "of Japan?"},
    ]
    talk = [
        {"role": "developer", "content": "Answer shortly."},
        {"role": "user", "content": FRANCE},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nParis. <|im_end|>"},
        {"role": "user", "content": parts},
    ]
    plain = [dict(message) for message in talk]
    plain[0]["role"] = "system"
    plain[3]["content"] = JAPAN
    for think in (False, True):
        template = ChatTemplate(MINI, service.tokenizer, think)
        plain[2]["content"] = "<think>\nhm\n</think>\n\nParis. " + template.hide("<|im_end|>")
        text, reason = alone(service, template.encode(plain))
        kwargs = {"chat_template_kwargs": {"enable_thinking": think}}
        answer = client(service).chat.completions.create(
            model="x", messages=talk, extra_body=kwargs, **GREEDY
        )
        assert answer.choices[0].message.content == text, think
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == reason
        assert answer.usage.prompt_tokens == len(template.encode(plain))


def test_the_end_of_an_answer_is_stop(service):
    talk = [{"role": "user", "content": JAPAN}]
    answer = client(service).chat.completions.create(
        model="x", messages=talk, temperature=0, max_completion_tokens=100, max_tokens=1
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "The capital of Japan is Tokyo."


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_is_the_same_text_in_pieces(service, chat):
    """By the openai package; whole characters; the usage comes last, if asked for."""
    talk = {"messages": [{"role": "user", "content": "法国的首都是哪里？"}]}
    prompt = talk if chat else {"prompt": "法国的首都是"}
    api = client(service).chat.completions if chat else client(service).completions
    whole = api.create(model="x", **prompt, **GREEDY)
    options = {"include_usage": True}
    stream = list(api.create(model="x", stream=True, stream_options=options, **prompt, **GREEDY))
    last = stream.pop()
    assert last.choices == [] and last.usage == whole.usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )
    assert all(piece.usage is None for piece in stream)
    assert len({piece.id for piece in stream}) == 1
    reasons = [piece.choices[0].finish_reason for piece in stream]
    assert reasons == [None] * (len(stream) - 1) + [whole.choices[0].finish_reason]
    if chat:
        assert stream[0].choices[0].delta.role == "assistant"
        texts = [piece.choices[0].delta.content or "" for piece in stream]
        assert "".join(texts) == whole.choices[0].message.content
    else:
        texts = [piece.choices[0].text for piece in stream]
        assert "".join(texts) == whole.choices[0].text
    assert len(texts) > 4 and "\ufffd" not in "".join(texts)
    without = list(api.create(model="x", stream=True, **prompt, **GREEDY))
    assert len(without) == len(stream)


def test_the_async_client_and_curl(service):
    async def ask(text):
        api = openai.AsyncOpenAI(base_url=f"{service.address}/v1", api_key="x")
        answer = await api.completions.create(model="x", prompt=text, **GREEDY)
        pieces = await api.completions.create(model="x", prompt=text, stream=True, **GREEDY)
        streamed = [piece.choices[0].text async for piece in pieces]
        return answer.choices[0].text, "".join(streamed)

    async def ask_all():
        return await asyncio.gather(*(ask(text) for text in texts))

    texts = [START, "Berlin is the capital of", "The"]
    wanted = [alone(service, encode(service, text))[0] for text in texts]
    assert asyncio.run(ask_all()) == [(text, text) for text in wanted]
    body = json.dumps({"prompt": START, "stream": True} | GREEDY)
    url = f"{service.address}/v1/completions"
    done = subprocess.run(["curl", "-sN", url, "-d", body], capture_output=True, text=True)
    *events, last, end = done.stdout.split("\n\n")
    assert last == "data: [DONE]" and end == ""
    pieces = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == wanted[0]


STOPS = [" Rome", "Italy is R", ["x", "ital of I"], ["is", "Paris"], ".", "The capital of Italy is"]


@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_ends_the_answer_wherever_its_tokens_end(service, stop, stream):
    """It is no part of the answer, nor is any beginning of it sent."""
    full = alone(service, encode(service, START), 30)[0]
    stops = [stop] if isinstance(stop, str) else stop
    wanted = full[: min(full.index(one) for one in stops if one in full)]
    fields = {"prompt": START, "temperature": 0, "max_tokens": 30, "stop": stop}
    answer = client(service).completions.create(model="x", stream=stream, **fields)
    pieces = list(answer) if stream else [answer]
    assert "".join(piece.choices[0].text for piece in pieces) == wanted
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_a_beginning_of_a_stop_that_goes_on_otherwise_is_sent(service):
    text, reason = alone(service, encode(service, START))
    for stop in text[-1] + "...", text[-9:] + "!", "zzz", "":
        answer = post(service, prompt=START, stop=stop, **GREEDY).json()["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == (text, reason), stop


def test_the_context_ends_an_answer(tmp_path):
    folder = shutil.copytree(MINI, tmp_path / "short")
    values(max_position_embeddings=20)(folder)
    with served(model=str(folder)) as service:
        answer = post(service, prompt=START, temperature=0).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 16  # the last one is not fed
        refused = post(service, prompt=START * 20)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"


def test_what_a_request_leaves_open(service, endless):
    """The checkpoint's generation_config.json, else greedy; flags and fields go before it."""
    assert service.defaults["temperature"] == 0.6 and service.defaults["top_k"] == 20
    assert service.defaults["top_p"] == 0.95 and service.defaults["max_tokens"] == 512
    given = serve.Service(argparse.Namespace(**FLAGS | {"temperature": 0.1, "max_tokens": 7}))
    assert given.defaults["temperature"] == 0.1 and given.defaults["top_k"] == 20
    assert given.defaults["max_tokens"] == 7
    greedy = serve.Service(argparse.Namespace(**FLAGS | {"model": str(endless)}))
    assert greedy.defaults["temperature"] == 0

    def text(**fields):
        return post(service, prompt="The", max_tokens=12, **fields).json()["choices"][0]["text"]

    draw = {"temperature": 1.5, "top_p": 1.0, "top_k": 0}
    assert text(seed=5, **draw) == text(seed=5, **draw) == text_of(service, seed=5, **draw)
    assert len({text(seed=seed, **draw) for seed in range(5)}) > 1
    assert len({text(**draw) for _ in range(5)}) > 1
    assert text(seed=5, temperature=1.5, top_k=1) == text(temperature=0)


def text_of(service, **draw):
    return alone(service, encode(service, "The"), **draw)[0]


# ---- Requests that are refused

DEEP = b'{"prompt": ' + b"[" * 100_000
REFUSED = {  # what is wrong -> body (JSON as bytes, or fields), status, what the message names
    "no JSON": (b"{", 400, "JSON"),
    "no object": (b"[1]", 400, "JSON"),
    "nothing": (b"", 400, "JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', 400, "JSON"),
    "half a surrogate pair": (b'{"prompt": "\\ud800"}', 400, "surrogate"),
    "nested too deeply": (DEEP, 400, "JSON"),
    "a number of 10,000 digits": (b'{"seed": ' + b"1" * 10_000 + b"}", 400, "JSON"),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
    "infinite": (b'{"prompt": "x", "temperature": Infinity}', 400, "temperature"),
    "too large": (b'{"prompt": "' + b"x" * 4_000_001 + b'"}', 413, "4000000"),
    "no prompt": ({}, 400, "prompt"),
    "an empty prompt": ({"prompt": ""}, 400, "prompt"),
    "a prompt of numbers": ({"prompt": [1, 2]}, 400, "prompt"),
    "two prompts": ({"prompt": ["a", "b"]}, 400, "prompt"),
    "negative temperature": ({"temperature": -0.1}, 400, "temperature"),
    "temperature as text": ({"temperature": "0"}, 400, "temperature"),
    "top_p above 1": ({"top_p": 1.1}, 400, "top_p"),
    "negative top_k": ({"top_k": -1}, 400, "top_k"),
    "top_k with a fraction": ({"top_k": 1.5}, 400, "top_k"),
    "no tokens": ({"max_tokens": 0}, 400, "max_tokens"),
    "true tokens": ({"max_tokens": True}, 400, "max_tokens"),
    "stop of a wrong type": ({"stop": 5}, 400, "stop"),
    "seed as text": ({"seed": "a"}, 400, "seed"),
    "two answers": ({"n": 2}, 400, "n"),
    "a penalty": ({"presence_penalty": 0.5}, 400, "presence_penalty"),
    "a bias": ({"logit_bias": {"5": 100}}, 400, "logit_bias"),
    "an unknown field": ({"min_p": 0.1}, 400, "min_p"),
}
MESSAGES = {
    "no messages": ([], "messages"),
    "an unknown role": ([{"role": "tool", "content": "x"}], "role"),
    "no content": ([{"role": "user"}], "content"),
    "a picture": ([{"role": "user", "content": [{"type": "image_url"}]}], "type"),
    "text": ("hello", "messages"),
}


def assert_refused(response, status, word):
    """OpenAI's error object, and nothing of the framework's own."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert word in error["message"] and "\n" not in error["message"], error
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_request_is_refused_by_name(service, name):
    body, status, word = REFUSED[name]
    url = f"{service.address}/v1/completions"
    if isinstance(body, bytes):
        response = HTTP.post(url, content=body)
    else:
        fields = body if "prompt" in name or "prompt" in body else {"prompt": "x"} | body
        response = HTTP.post(url, json=fields)
    assert_refused(response, status, word)


@pytest.mark.parametrize("name", MESSAGES)
def test_wrong_messages_are_refused_by_name(service, name):
    messages, word = MESSAGES[name]
    assert_refused(post(service, "chat/completions", messages=messages), 400, word)


def test_a_body_without_a_length_has_the_same_limit(service):
    parts = (b" " * 100_000 for _ in range(60))
    response = HTTP.post(f"{service.address}/v1/completions", content=parts)
    assert_refused(response, 413, "4000000")


def test_fields_that_change_nothing_pass(service):
    wanted = post(service, prompt=START, **GREEDY).json()["choices"]
    harmless = {
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "user": "me",
        "echo": False,
    }
    harmless |= {"logit_bias": None, "best_of": 1, "stop": None, "stream": False, "logprobs": None}
    harmless |= {"suffix": None, "seed": None, "top_p": None, "model": "any", "logit_bias": {}}
    assert post(service, prompt=[START], **harmless, **GREEDY).json()["choices"] == wanted


def test_unknown_paths_and_methods_have_the_error_object(service):
    assert_refused(HTTP.get(f"{service.address}/v2"), 404, "Not Found")
    assert_refused(HTTP.get(f"{service.address}/v1/completions"), 405, "Not Allowed")


def test_a_model_without_a_template_only_continues(endless):
    shutil.copytree(endless, endless.parent / "base", dirs_exist_ok=True)
    path = endless.parent / "base" / "tokenizer_config.json"
    path.write_text("{}")
    with served(model=str(path.parent)) as service:
        assert post(service, prompt="x", max_tokens=2).status_code == 200
        response = post(service, "chat/completions", messages=[{"role": "user", "content": "x"}])
        assert_refused(response, 400, "template")


def test_the_key_and_other_origins():
    """Only who knows the key is answered; pages of other sites only if a flag allows it."""
    with served(key="schlüssel", origin="https://chat.example") as service:
        url = f"{service.address}/v1/models"
        right = "Bearer schlüssel".encode()
        for wrong in None, b"Bearer schl", b"schl\xc3\xbcssel", b"Bearer \xff", right + b"x":
            headers = {} if wrong is None else {b"Authorization": wrong}
            assert_refused(HTTP.get(url, headers=headers), 401, "key")
        assert HTTP.get(url, headers={b"Authorization": right}).status_code == 200
        for path in "completions", "chat/completions":
            assert_refused(post(service, path, prompt="x"), 401, "key")
        seen = HTTP.get(url, headers={"Origin": "https://chat.example"}).headers
        assert seen["access-control-allow-origin"] == "https://chat.example"
    with served() as service:
        headers = {"Origin": "https://chat.example"}
        seen = HTTP.get(f"{service.address}/v1/models", headers=headers).headers
        assert not [name for name in seen if name.startswith("access-control")]


# ---- Many at once


def busy(service):
    return len(service.engine.running)


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "did not happen in 20 s"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def slow(endless):
    """One slot, and one request may wait."""
    with served(model=str(endless), slots=1, queue=1) as service:
        yield service


LONG = {"prompt": "The capital", "max_tokens": 4000, "temperature": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(slow, stream):
    """At the next step, streamed or not; the next request is answered."""
    with httpx.Client(timeout=0.5) as leaving, contextlib.suppress(httpx.ReadTimeout):
        with leaving.stream(
            "POST", f"{slow.address}/v1/completions", json=LONG | {"stream": stream}
        ):
            wait_for(lambda: busy(slow) == 1)
    wait_for(lambda: busy(slow) == 0)
    assert post(slow, prompt="x", max_tokens=2).status_code == 200


def test_a_full_queue_answers_at_once(slow):
    """429 with Retry-After; those who wait are answered afterwards."""
    answers = []

    def ask(seconds):
        with contextlib.suppress(httpx.ReadTimeout):
            url = f"{slow.address}/v1/completions"
            answers.append(httpx.post(url, json=LONG | {"max_tokens": 100}, timeout=seconds))

    threads = [threading.Thread(target=ask, args=(60,)) for _ in range(2)]
    threads[0].start()
    wait_for(lambda: busy(slow) == 1)
    threads[1].start()
    wait_for(lambda: slow.engine.waiting.full())
    start = time.monotonic()
    refused = post(slow, prompt="x")
    assert_refused(refused, 429, "waiting")
    assert int(refused.headers["retry-after"]) >= 1
    assert busy(slow) == 1 and time.monotonic() - start < 5
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200, 200]


def test_a_step_that_fails_ends_its_requests_and_no_others(service, monkeypatch):
    """500, or an error event where the stream has begun; then the server goes on."""
    right = batch.advance
    failing = threading.Event()

    def advance(sequences, *model):
        if failing.is_set() or any(len(sequence.answer) == 3 for sequence in sequences):
            failing.clear()
            raise RuntimeError("out of memory")
        return right(sequences, *model)

    wanted = post(service, prompt=START, **GREEDY).json()["choices"][0]["text"]
    with monkeypatch.context() as patch:
        patch.setattr(batch, "advance", advance)
        failing.set()
        assert_refused(post(service, prompt=START, **GREEDY), 500, "out of memory")
        assert_refused(post(service, prompt=START, **GREEDY), 500, "out of memory")
        body = post(service, prompt=START, stream=True, **GREEDY).text
        *events, last, _ = body.split("\n\n")
        assert len(events) == 3 and "out of memory" in json.loads(last[6:])["error"]["message"]
        with pytest.raises(openai.APIError, match="out of memory"):
            list(client(service).completions.create(model="", prompt=START, stream=True, **GREEDY))
    assert post(service, prompt=START, **GREEDY).json()["choices"][0]["text"] == wanted


def test_many_clients_get_what_they_would_get_alone(service):
    """Ragged lengths, more than there are slots, some leaving: none is lost or crossed."""
    words = "The capital of France is Paris and of Italy is Rome while Berlin is in Germany".split()
    prompts = [" ".join(words[: 1 + index % len(words)]) for index in range(12)]
    wanted = [
        alone(service, encode(service, text), 4 + 3 * index)[0]
        for index, text in enumerate(prompts)
    ]

    async def ask(http, index):
        fields = {"prompt": prompts[index], "temperature": 0, "max_tokens": 4 + 3 * index}
        response = await http.post(f"{service.address}/v1/completions", json=fields)
        while response.status_code == 429:
            await asyncio.sleep(0.05)
            response = await http.post(f"{service.address}/v1/completions", json=fields)
        return response.json()["choices"][0]["text"]

    async def ask_all():
        async with httpx.AsyncClient(timeout=60) as http:
            return await asyncio.gather(*(ask(http, index) for index in range(len(prompts))))

    assert asyncio.run(ask_all()) == wanted


def test_a_shared_beginning_is_read_once(service):
    """By a later request, an answer's continuation, and one that comes while the first is read;
    the last token of a prompt is always fed, and answers stay the same."""
    service.engine.kept.clear()
    long = "The capital of Poland is Warsaw. " * 20
    ids = encode(service, long)

    def ask(text):
        answer = post(service, prompt=text, **GREEDY).json()
        assert answer["choices"][0]["text"] == alone(service, encode(service, text))[0]
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0][
            "text"
        ]

    first, text = ask(long)
    assert first == 0
    assert ask(long)[0] == len(ids) - 1
    assert ask(long + text + " And")[0] >= len(ids)
    assert len(ids) - 3 <= ask(long + "Berlin")[0] <= len(ids)
    assert ask("Berlin is")[0] == 0
    limit = service.engine.kept_tokens
    try:
        service.engine.kept_tokens = 200
        ask("Rome")
        assert sum(map(engine.rows, service.engine.kept)) <= 200
    finally:
        service.engine.kept_tokens = limit


def test_a_long_prompt_does_not_stall_the_others(endless):
    """While it is read in chunks, a running answer goes on."""
    with served(model=str(endless), slots=2) as service:
        pieces = []
        with httpx.stream(
            "POST", f"{service.address}/v1/completions", json=LONG | {"stream": True}, timeout=60
        ) as running:
            lines = running.iter_lines()
            next(lines)
            long = {"prompt": "word " * 700, "max_tokens": 1, "temperature": 0}
            thread = threading.Thread(target=lambda: pieces.append(post(service, **long)))
            thread.start()
            count = 0
            while thread.is_alive():
                count += bool(next(lines))
            thread.join()
        steps = pieces[0].json()["usage"]["prompt_tokens"] // llm.CHUNK
        assert pieces[0].status_code == 200 and steps > 4
        assert count >= steps // 2


# ---- The program


def start_server(*arguments, **options):
    """The server as a user starts it, and its address, once it is there."""
    command = [sys.executable, "-m", MODULE, "--port", "0", *map(str, arguments)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    for line in process.stderr:
        if "http://" in line:
            return process, line.partition("http://")[2].partition("/")[0]
    raise AssertionError(process.communicate())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_running_answers_end(endless, number):
    """Exit 0, nothing but the address on stderr, and the answer is whole."""
    process, address = start_server("--model", endless)
    answers = []
    fields = LONG | {"max_tokens": 150}
    ask = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"http://{address}/v1/completions", json=fields, timeout=30)
        )
    )
    ask.start()
    time.sleep(0.3)
    process.send_signal(number)
    ask.join()
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")
    assert answers[0].json()["usage"]["completion_tokens"] == 150


def test_wrong_usage_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = assert_one_complaint(run("--model", MINI, "--port", port, module=MODULE))
        assert f"--port {port}" in line and "in use" in line
    line = assert_one_complaint(run("--model", "nowhere", "--port", 0, module=MODULE))
    assert "nowhere" in line
    for flag in ("--port 99999", "--slots 0"):
        result = run(*flag.split(), module=MODULE)
        assert result.code == 2 and flag.split()[0] in result.lines[-1], result


def test_unsure_is_the_longest_beginning_of_a_stop():
    assert engine.unsure("the end", ["ending", "d!", "xyz"]) == 3
    assert engine.unsure("aaa", ["aab"]) == 2
    assert engine.unsure("done", ["done"]) == 0  # a whole one is found elsewhere
    assert engine.unsure("", ["a"]) == 0
    assert openai_api.usage(3, 1, 2)["total_tokens"] == 5
