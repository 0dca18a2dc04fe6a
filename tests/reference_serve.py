"""examples/serve.py under load: 64 clients for a minute, memory after 1,000 requests, and what
sharing a step gains, on the miniature and on a full-size model with random weights.

Speed needs LD_PRELOAD with OpenBLAS. A target fails only below 0.7 of it in three tries of three.
"""

import asyncio
import itertools
import random
import time
from pathlib import Path

import httpx
import mlx.core as mx
import pytest
from checkpoints import FULL_SIZE, MINI, random_weights
from reference_batch import needs_blas
from test_serve import served, start_server

import llm_inference as llm
from examples.common import encode

CLIENTS = 64
SECONDS = 60
COUNTRIES = "France Italy Spain Japan China Germany Poland Canada Brazil Egypt".split()


@pytest.fixture(scope="module")
def cases():
    """Requests of ragged lengths, with the text that generate gives, where no two tokens are so
    near each other that a batch may round to the other one."""
    weights, config, tokenizer = llm.load(MINI, mx.float32)
    stop = config["eos_token_id"]
    draw = random.Random(0)
    found = []
    for country, times in itertools.product(COUNTRIES, (1, 3, 12)):
        prompt = f"The capital of {country} is" + f" {country} is the capital of" * (times - 1)
        ids = encode(prompt, tokenizer)
        max_tokens = draw.randint(4, 40)
        answer = list(llm.generate(ids, weights, config, stop, max_tokens))
        text = tokenizer.decode(answer, skip_special_tokens=False)
        if lead(ids, answer, weights, config) > 1e-3:
            found.append(({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}, text))
    assert len(found) > 20
    return found


def lead(prompt, answer, weights, config):
    """By how much, at least, the likeliest token of a step led."""
    cache = llm.make_cache(weights, config, len(prompt) + len(answer))
    x = llm.hidden_states(prompt + answer, weights, config, cache, 0)
    logits = llm.head(x[len(prompt) - 1 :], weights, config)
    best = mx.topk(logits, 2, axis=-1)
    return mx.abs(best[:, 0] - best[:, 1]).min().item()


async def ask(http, case, times):
    """Stream one answer; notes when the first text came, and the number of tokens."""
    fields, wanted = case
    start = time.perf_counter()
    text = ""
    async with http.stream("POST", "/v1/completions", json=fields | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                piece = httpx.Response(200, content=line[6:]).json()["choices"][0]
                if not text and piece["text"]:
                    times.append(time.perf_counter() - start)
                text += piece["text"]
    assert line == "" or line == "data: [DONE]"
    assert text == wanted, (fields, text, wanted)


async def load(address, cases, clients, seconds, times):
    """Each client asks again and again; some leave before their answer ends. Answers a second."""
    limits = httpx.Limits(max_connections=clients)
    end = time.perf_counter() + seconds
    count = 0

    async def go_on(http, number):
        nonlocal count
        draw = random.Random(number)
        while time.perf_counter() < end:
            if clients > 1 and draw.random() < 0.05:
                try:
                    await asyncio.wait_for(ask(http, draw.choice(cases), []), draw.random() / 10)
                except TimeoutError:
                    continue
            await ask(http, draw.choice(cases), times)
            count += 1

    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=60) as http:
        start = time.perf_counter()
        await asyncio.gather(*(go_on(http, number) for number in range(clients)))
    return count / (time.perf_counter() - start)


def test_64_clients_for_a_minute(cases):
    """Each answer is the single one; how long the first token takes, and what is gained."""
    process, address = start_server("--model", MINI, "--dtype", "float32", "--queue", CLIENTS)
    address = f"http://{address}"
    try:
        ratios = []
        for attempt in range(3):
            one = asyncio.run(load(address, cases, 1, 8, []))
            times = []
            many = asyncio.run(load(address, cases, CLIENTS, SECONDS if not attempt else 15, times))
            times.sort()
            p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
            ratios.append(many / one)
            print(
                f"\n64 clients: {len(times)} answers, first token p50 {p50:.2f} s, p99 {p99:.2f} s"
            )
            print(f"{one:.1f} answers/s one after another, {many:.1f} together: {many / one:.2f}")
            if ratios[-1] >= 0.7 * 1.5:
                break
        print("target 1.5")
        assert max(ratios) >= 0.7 * 1.5
        health = httpx.get(f"{address}/health")
        assert health.status_code == 200
    finally:
        process.terminate()
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")


def resident(process):
    """Bytes of memory that the process has now."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_memory_does_not_grow_with_the_requests(cases):
    """After 1,000 requests within 5 % of that after 100."""
    process, address = start_server("--model", MINI, "--dtype", "float32")

    async def ask_some(count):
        places = asyncio.Semaphore(16)

        async def one(http, number):
            async with places:
                await ask(http, cases[number % len(cases)], [])

        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as http:
            await asyncio.gather(*(one(http, number) for number in range(count)))

    try:
        asyncio.run(ask_some(100))
        before = resident(process)
        asyncio.run(ask_some(900))
        after = resident(process)
        print(f"\n{before / 1e6:.1f} MB after 100 requests, {after / 1e6:.1f} MB after 1,000")
        assert after <= 1.05 * before
    finally:
        process.kill()
        process.communicate()


@needs_blas
def test_8_clients_of_a_full_size_model(monkeypatch):
    """Target: 3 times what one after another gives."""
    config = llm.load(MINI)[1] | FULL_SIZE
    weights = random_weights(config, mx.float32)
    tokenizer = llm.load(MINI)[2]
    monkeypatch.setattr(llm, "load_model", lambda args: (weights, config, tokenizer))
    fields = {"max_tokens": 10, "temperature": 0}

    async def together(address, count):
        async with httpx.AsyncClient(base_url=address, timeout=300) as http:
            asked = [
                http.post("/v1/completions", json=fields | {"prompt": f"{number} times"})
                for number in range(count)
            ]
            answers = await asyncio.gather(*asked)
        return sum(answer.json()["usage"]["completion_tokens"] for answer in answers)

    with served(slots=8) as service:
        asyncio.run(together(service.address, 1))
        ratios = []
        while len(ratios) < 3 and max(ratios, default=0) < 0.7 * 3:
            start = time.perf_counter()
            one = sum(asyncio.run(together(service.address, 1)) for _ in range(3))
            one /= time.perf_counter() - start
            start = time.perf_counter()
            many = asyncio.run(together(service.address, 8)) / (time.perf_counter() - start)
            ratios.append(many / one)
            print(f"\n8 clients {many:.1f} tokens/s, one {one:.1f}: {many / one:.2f} (target 3)")
    assert max(ratios) >= 0.7 * 3
