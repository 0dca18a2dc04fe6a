"""examples/explore.py: what the page shows is what the file's functions compute."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import mlx.core as mx
import numpy as np
import pytest
from terminal import ROOT, START, assert_one_complaint, environment, run
from test_serve import listening

import llm_inference as llm
from examples import explore, inside
from examples.common import encode

MODULE = "examples.explore"
LONG = "The capital of Poland is Warsaw. "


def explored(*model, name="mini", seed=None):
    """The address of an explorer that runs in a thread of this process."""
    return listening(explore.build_app(inside.Explorer(name, *model, seed=seed)))


@pytest.fixture(scope="module")
def page(model):
    """A client of a running explorer."""
    with explored(*model, seed=3) as address:
        with httpx.Client(base_url=address, timeout=60) as http:
            yield http


def ask(page, path, **fields):
    return page.post(f"/{path}", json=fields)


def read(page, prompt):
    """The first line, and the guesses of all layers."""
    first, *rows = map(json.loads, ask(page, "read", prompt=prompt).text.splitlines())
    assert [row["layer"] for row in rows] == list(range(first["layers"]))
    return first, [row["rows"] for row in rows]


def assert_refused(response, *words):
    assert response.status_code == 400 and set(response.json()) == {"error"}, response.text
    assert all(word in response.json()["error"] for word in words), response.text


def test_tokens_and_the_lens(page, model):
    """Ids, texts, and the shares of the head after each layer, by transformer_block alone."""
    weights, config, tokenizer = model
    first, rows = read(page, START)
    ids = encode(START, tokenizer)
    assert [token["id"] for token in first["tokens"]] == ids
    assert [token["text"] for token in first["tokens"]] == [tokenizer.decode([i]) for i in ids]
    assert (first["layers"], first["heads"], first["model"]) == (6, 4, "mini")
    assert first["cache_bytes"] == 2 * 6 * 2 * 32 * 4
    x = llm.embed(ids, weights, config)
    cache = llm.make_cache(weights, config, 5)
    for layer in range(6):
        x = llm.transformer_block(x, weights, config, layer, cache, 0)
        shares = np.array(mx.softmax(llm.head(x, weights, config), axis=-1))
        for at in range(5):
            best = np.argsort(-shares[at])[: inside.GUESSES]
            assert [guess["id"] for guess in rows[layer][at]] == best.tolist()
            found = [guess["share"] for guess in rows[layer][at]]
            assert np.allclose(found, shares[at][best], atol=1e-5)
    assert rows[5][4][0]["text"] == " Paris"


def test_a_part_of_a_character_shows_its_bytes(page):
    """龘 is three tokens of a byte each; added tokens and letters beyond ASCII are text."""
    first, _ = read(page, "龘 é<|im_end|>")
    texts = [token["text"] for token in first["tokens"]]
    assert texts[:3] == ["⟨E9⟩", "⟨BE⟩", "⟨98⟩"] and texts[-1] == "<|im_end|>"
    assert "é" in "".join(texts[3:])
    assert sorted(inside.BYTES.values()) == list(range(256)) and inside.BYTES["Ġ"] == 32


def test_the_attention_of_a_head(page, model, monkeypatch):
    """Each row adds up to 1 and sees nothing later; equal to what attention itself mixed with."""
    weights, config, tokenizer = model
    seen = []
    right = llm.attention_weights
    monkeypatch.setattr(llm, "attention_weights", lambda q, k: seen.append(right(q, k)) or seen[-1])
    monkeypatch.setattr(llm, "FUSED", False)
    ids = encode(START, tokenizer)
    llm.hidden_states(ids, weights, config, llm.make_cache(weights, config, 5), 0)
    wanted = np.array(mx.stack(seen))
    monkeypatch.undo()
    name = read(page, START)[0]["text"]
    for layer in range(6):
        for head in range(4):
            answer = ask(page, "attention", text=name, layer=layer, head=head).json()
            found = np.array(answer["rows"])
            assert np.allclose(found, wanted[layer, head], atol=1e-6), (layer, head)
            assert np.allclose(found.sum(axis=1), 1, atol=1e-5) and not np.triu(found, 1).any()
    for wrong in {"layer": 6, "head": 0}, {"layer": 0, "head": 4}:
        assert_refused(ask(page, "attention", text=name, **wrong), "layers are 0 to 5")


DRAWS = [(0, 0, 1.0), (1, 0, 1.0), (0.7, 3, 1.0), (1.5, 0, 0.9), (2, 5, 0.6), (1, 0, 0.0)]


@pytest.mark.parametrize("temperature, top_k, top_p", DRAWS)
def test_the_shares_and_what_the_filters_leave(page, model, temperature, top_k, top_p):
    """Against a distribution in float64, filtered by sorting."""
    weights, config, tokenizer = model
    name = read(page, START)[0]["text"]
    draw = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    answer = ask(page, "next", text=name, **draw).json()
    cache = llm.make_cache(weights, config, 5)
    logits = llm.forward(encode(START, tokenizer), weights, config, cache, 0)
    logits = np.array(logits, dtype=np.float64) / (temperature or 1)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    order = np.argsort(-shares)
    kept = order[: top_k or None]
    before = np.cumsum(shares[kept] / shares[kept].sum()) - shares[kept] / shares[kept].sum()
    kept = kept[(before < max(top_p, 1e-9)) | (top_p >= 1)]
    kept = order[:1] if temperature == 0 else kept
    assert answer["survivors"] == len(kept) and answer["vocabulary"] == 2112
    for candidate, token_id in zip(answer["candidates"], order):
        left = shares[token_id] / shares[kept].sum() if token_id in kept else 0
        assert candidate["id"] == token_id
        assert abs(candidate["share"] - shares[token_id]) < 1e-5
        assert abs(candidate["left"] - left) < 1e-5
    assert len(answer["candidates"]) == inside.CANDIDATES


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_steps_are_those_of_generate(page, model, temperature, monkeypatch):
    """With a seed, or greedy; each step feeds one token, and its guesses are those of a reading
    from the beginning."""
    weights, config, tokenizer = model
    fed = []
    right = llm.embed
    monkeypatch.setattr(llm, "embed", lambda ids, *rest: fed.append(len(ids)) or right(ids, *rest))
    name = read(page, START)[0]["text"]
    columns = []
    for _ in range(8):
        answer = ask(page, "step", text=name, temperature=temperature).json()
        columns.append(answer)
    assert fed == [5] + [1] * 8
    ids = encode(START, tokenizer)
    draw = {"seed": 3, "temperature": temperature, "max_tokens": 8}
    wanted = list(llm.generate(ids, weights, config, (), **draw))
    assert [answer["token"]["id"] for answer in columns] == wanted
    rows = read(page, START + tokenizer.decode(wanted))[1]
    for layer in range(6):
        for step in range(8):
            found = columns[step]["guesses"][layer]
            again = rows[layer][5 + step]
            assert [guess["id"] for guess in found] == [guess["id"] for guess in again]
    taken = ask(page, "attention", text=name, layer=2, head=0).json()["rows"]
    assert len(taken) == len(taken[-1]) == 13


def test_the_end_of_the_text_is_said(page):
    name = read(
        page, "<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n<|im_start|>assistant\n"
    )
    name = name[0]["text"]
    answers = [ask(page, "step", text=name).json() for _ in range(30)]
    ended = [answer for answer in answers if "end" in answer]
    assert ended and ended[0]["end"]["text"] == "<|im_end|>" and "token" not in ended[0]


def test_what_cannot_be_shown_is_one_sentence(page):
    assert_refused(ask(page, "read", prompt=LONG * 40), "tokens", "200")
    assert_refused(ask(page, "read", prompt=""), "0 tokens")
    assert_refused(ask(page, "read", prompt="x" * 20_001), "prompt")
    assert_refused(ask(page, "read"), "prompt")
    assert_refused(page.post("/read", content=b"{"))
    assert_refused(ask(page, "step", text="nobody"), "read it again")
    name = read(page, "x")[0]["text"]
    for wrong in {"temperature": -1}, {"top_p": 2}, {"top_k": -1}, {"temperature": "nan"}:
        assert_refused(ask(page, "next", text=name, **wrong), *wrong)
    assert page.get("/", headers={"Host": "evil.example"}).status_code == 400


def test_200_tokens_are_read(page, model):
    ids = encode(LONG * 40, model[2])[:200]
    first, _ = read(page, model[2].decode(ids))
    assert len(first["tokens"]) == 200


def test_several_tabs_do_not_disturb_each_other(page):
    """Readings and steps at the same time; the oldest texts are let go."""
    results = {}

    def tab(prompt):
        name = read(page, prompt)[0]["text"]
        texts = [ask(page, "step", text=name).json()["token"]["text"] for _ in range(6)]
        results.setdefault(prompt, []).append("".join(texts))

    prompts = [START, "Berlin is the capital of", "The capital of Japan is"]
    threads = [threading.Thread(target=tab, args=(prompt,)) for prompt in prompts * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt in prompts:
        tab(prompt)
        assert len(results[prompt]) == 4 and len(set(results[prompt])) == 1, results[prompt]
    first = read(page, "x")[0]["text"]
    for _ in range(inside.TEXTS):
        read(page, "x")
    assert_refused(ask(page, "step", text=first), "read it again")


def test_a_context_that_ends_and_logits_that_are_not_finite(model):
    weights, config, tokenizer = model
    short = weights, config | {"max_position_embeddings": 7}, tokenizer
    with explored(*short) as address, httpx.Client(base_url=address) as http:
        assert_refused(ask(http, "read", prompt=START * 2), "1 to 7")
        name = read(http, START)[0]["text"]
        assert "token" in ask(http, "step", text=name).json()
        assert "token" in ask(http, "step", text=name).json()
        assert_refused(ask(http, "step", text=name), "full")
    broken = weights | {"model.norm.weight": weights["model.norm.weight"] * mx.nan}
    mx.eval(broken)  # as load does: what is not computed yet belongs to this thread
    with explored(broken, config, tokenizer) as address, httpx.Client(base_url=address) as http:
        first, last = map(json.loads, ask(http, "read", prompt=START).text.splitlines())
        assert "not finite" in last["error"]
        assert_refused(ask(http, "step", text=first["text"]), "still being read")


def test_the_page_loads_nothing_from_elsewhere(page):
    html = page.get("/").text
    assert html.startswith("<!doctype html>")
    for word in ("http://", "https://", "//cdn", "innerHTML", "outerHTML", "insertAdjacentHTML"):
        assert word not in html.replace("http://www.w3.org/2000/svg", ""), word


def test_the_program_ends_without_a_word(tmp_path):
    command = [sys.executable, "-m", MODULE, "--port", "0", "--no-browser"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    for line in process.stderr:
        if b"http://" in line:
            break
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (out, err) == (b"", b"") and process.returncode in (0, 130)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = assert_one_complaint(run("--port", port, "--no-browser", module=MODULE))
    assert f"--port {port}" in line
    shutil.rmtree(tmp_path)
    line = assert_one_complaint(run("--model", tmp_path, "--port", 0, module=MODULE))
    assert "config.json" in line
