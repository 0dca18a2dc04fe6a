"""The engine of llm_inference.py: against a float64 oracle, its formulas, and what goes wrong with checkpoints in the field."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

os.environ.setdefault(
    "MLX_ENABLE_TF32", "0"
)  # on NVIDIA, float32 products would otherwise keep 10 bits
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import checkpoints
import mlx.core as mx
import numpy as np
import pytest

import llm_inference as llm
from examples import check

F32, BF16, F16 = mx.float32, mx.bfloat16, mx.float16
STEP = {
    F32: 2.0**-23,
    BF16: 2.0**-7,
    F16: 2.0**-10,
}  # from 1 to the next number; rounding errs by half of it at most
SMALL = dict(vocab_size=300, num_hidden_layers=2, rms_norm_eps=1e-3)  # an eps that can be seen
TINY = checkpoints.make_config(
    vocab_size=100,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=48,
)
REAL = ROOT / "Qwen3-0.6B"

both_paths = pytest.mark.parametrize(
    "plain", [True, False], ids=["spelled", "fused"], indirect=True
)
both_types = pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])


# ---- The oracle: Qwen3 in float64 NumPy, from the published formulas: head by head, row by row, without a cache.


def numbers(array):
    """An MLX array as float64: every type used here fits into it exactly."""
    return np.array(array.astype(F32), dtype=np.float64)


def oracle_norm(x, weight, eps):
    """RMSNorm, arXiv 1910.07467."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def oracle_rope(x, offset, theta):
    """RoPE, arXiv 2104.09864: channels j and j + d/2 are the two parts of a complex number that turns with the position."""
    half = x.shape[-1] // 2
    angles = np.outer(offset + np.arange(x.shape[-2]), float(theta) ** (-np.arange(half) / half))
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1)


def oracle_attend(q, k, v):
    """Grouped-query attention, arXiv 2305.13245: H/K neighbouring query heads share a key/value head; the last query stands last."""
    (H, L, d), (K, S, _) = q.shape, k.shape
    out = np.empty((H, L, v.shape[-1]))
    for h in range(H):
        keys, values = k[h // (H // K)], v[h // (H // K)]
        for i in range(L):
            known = S - L + i + 1
            scores = keys[:known] @ q[h, i] / np.sqrt(d)
            p = np.exp(scores - scores.max())
            out[h, i] = p / p.sum() @ values[:known]
    return out


def oracle_attention(x, w, config, layer):
    """The attention part of a block over a whole sequence (L, D)."""
    name, H = f"model.layers.{layer}.self_attn", config["num_attention_heads"]
    d, eps = config.get("head_dim") or config["hidden_size"] // H, config["rms_norm_eps"]
    q, k, v = (
        np.stack(np.split(x @ w[f"{name}.{part}_proj.weight"].T, heads, axis=1))
        for part, heads in zip(
            "qkv", (H, config["num_key_value_heads"], config["num_key_value_heads"])
        )
    )
    q = oracle_rope(oracle_norm(q, w[f"{name}.q_norm.weight"], eps), 0, config["rope_theta"])
    k = oracle_rope(oracle_norm(k, w[f"{name}.k_norm.weight"], eps), 0, config["rope_theta"])
    assert q.shape[-1] == d
    return np.concatenate(list(oracle_attend(q, k, v)), axis=1) @ w[f"{name}.o_proj.weight"].T


def oracle_ffn(x, w, layer):
    """SwiGLU, arXiv 2002.05202."""
    gate, up, down = (
        w[f"model.layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")
    )
    return (x @ gate.T / (1 + np.exp(-x @ gate.T)) * (x @ up.T)) @ down.T


def oracle_block(x, w, config, layer):
    """Pre-norm residual block."""
    name, eps = f"model.layers.{layer}", config["rms_norm_eps"]
    x = x + oracle_attention(
        oracle_norm(x, w[f"{name}.input_layernorm.weight"], eps), w, config, layer
    )
    return x + oracle_ffn(
        oracle_norm(x, w[f"{name}.post_attention_layernorm.weight"], eps), w, layer
    )


def oracle(ids, weights, config):
    """Logits (L, V) after each of the ids."""
    w = {name: numbers(array) for name, array in weights.items()}
    x = w["model.embed_tokens.weight"][np.array(ids)]
    for layer in range(config["num_hidden_layers"]):
        x = oracle_block(x, w, config, layer)
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    return oracle_norm(x, w["model.norm.weight"], config["rms_norm_eps"]) @ w[head].T


# ---- Helpers


@pytest.fixture
def plain(request, monkeypatch):
    """Runs the test with the spelled-out math (True) or MLX's fused kernels (False)."""
    monkeypatch.setattr(llm, "FUSED", not request.param)
    return request.param


def off(got, want):
    """The largest error, relative to the largest number wanted."""
    got, want = (numbers(a) if isinstance(a, mx.array) else a for a in (got, want))
    assert got.shape == want.shape and np.isfinite(got).all()
    return np.abs(got - want).max() / np.abs(want).max()


def model(folder, dtype=F32, seed=0, **changes):
    """A random checkpoint, written and loaded: weights, config as loaded, config as written."""
    written = checkpoints.make_config(**SMALL | changes)
    weights, config, _ = llm.load(
        checkpoints.write_checkpoint(folder, written, dtype=dtype, seed=seed)
    )
    return weights, config, written


def random_ids(count, vocab=300, seed=1):
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def normal(*shape, dtype=F32, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(
        dtype
    )


def logits_of(ids, weights, config):
    """One pass without a past."""
    return llm.forward(ids, weights, config, llm.make_cache(weights, config, len(ids)), 0)


def record_forward(monkeypatch):
    """The (offset, count) of every later call of forward."""
    calls, original = [], llm.forward

    def forward(token_ids, weights, config, cache, offset):
        calls.append((offset, len(token_ids)))
        return original(token_ids, weights, config, cache, offset)

    monkeypatch.setattr(llm, "forward", forward)
    return calls


# ---- The whole model

SHAPES = {
    "one KV head, head_dim = hidden / heads": dict(num_key_value_heads=1, head_dim=16),
    "some KV heads, head_dim above": dict(num_key_value_heads=2, head_dim=32),
    "all KV heads, head_dim below": dict(num_key_value_heads=4, head_dim=8),
    "groups of four, theta 50000": dict(
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, rope_theta=50000
    ),
    "groups of two, odd sizes": dict(
        hidden_size=60,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=14,
        intermediate_size=50,
    ),
    "head_dim absent": dict(head_dim=None),
}


@both_paths
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_logits_equal_the_oracle(tmp_path, shape, tied, plain):
    """70 tokens in one pass, and 64 and six single steps: within 1e-5 of the largest logit."""
    weights, config, written = model(tmp_path, tie_word_embeddings=tied, **SHAPES[shape])
    ids = random_ids(70)
    want, cache = oracle(ids, weights, written), llm.make_cache(weights, config, 70)
    assert off(logits_of(ids, weights, config), want[-1]) < 1e-5
    assert off(llm.forward(ids[:64], weights, config, cache, 0), want[63]) < 1e-5
    for i in range(64, 70):
        assert off(llm.forward(ids[i : i + 1], weights, config, cache, i), want[i]) < 1e-5, (
            f"row {i}"
        )


@both_paths
def test_bfloat16_logits_follow_the_oracle(tmp_path, plain):
    """A bfloat16 model errs by roundings only: a few steps of 2^-8 after two layers."""
    weights, config, written = model(tmp_path, BF16)
    ids = random_ids(60)
    assert off(logits_of(ids, weights, config), oracle(ids, weights, written)[-1]) < 4 * 2**-8


@both_paths
def test_forward_takes_a_list_or_an_array(tmp_path, plain):
    """Token ids may be Python's or MLX's; the answer is one row of logits."""
    weights, config, _ = model(tmp_path)
    a, b = logits_of([3, 1, 4], weights, config), logits_of(mx.array([3, 1, 4]), weights, config)
    assert a.shape == (300,) and mx.array_equal(a, b)


@both_paths
def test_the_config_chooses_the_head(tmp_path, plain):
    """Tied means the embedding, even where a dict of weights holds another head."""
    weights, config, written = model(tmp_path)
    got = logits_of([3, 1, 4], weights | {"lm_head.weight": normal(300, 64)}, config)
    assert off(got, oracle([3, 1, 4], weights, written)[-1]) < 1e-5


# ---- Each function against its formula


@both_paths
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size, eps", [(1e-3, 1e-6), (1, 0.5), (300, 1e-6)])
def test_rms_norm(size, eps, dtype, plain):
    """eps counts, and 300^2 does not overflow in float16: each number is right but for two roundings (four in float32)."""
    x, weight = (normal(3, 5, 48) * size).astype(dtype), normal(48, dtype=dtype, seed=1)
    got, want = llm.rms_norm(x, weight, eps), oracle_norm(numbers(x), numbers(weight), eps)
    assert got.dtype == dtype
    np.testing.assert_allclose(numbers(got), want, rtol=STEP[dtype] * (2 if dtype == F32 else 1))


@both_paths
@both_types
@pytest.mark.parametrize("theta", [10000, 1000000])
@pytest.mark.parametrize("offset", [0, 1, 57, 255, 1023])
@pytest.mark.parametrize("shape", [(1, 7, 32), (3, 1, 8), (2, 9, 128), (2, 3, 5, 16)], ids=str)
def test_rope(shape, offset, theta, dtype, plain):
    """Float32 angles are off by their own rounding, 2^-22 of the position; bfloat16 results by that of cos, sin and the products."""
    x = normal(*shape, dtype=dtype)
    got, want = llm.apply_rope(x, offset, theta), oracle_rope(numbers(x), offset, theta)
    bound = np.abs(want).max() * (
        (offset + shape[-2]) * 2**-22 + (1e-6 if dtype == F32 else 1.5 * STEP[dtype])
    )
    assert got.dtype == dtype and np.abs(numbers(got) - want).max() < bound


@both_paths
@pytest.mark.parametrize("pair", range(4))
def test_rope_turns_halves_not_neighbours(pair, plain):
    """A lone 1 in channel j shows the pair: cos stays in j, sin goes to j + d/2."""
    x = np.zeros((1, 8), np.float32)
    x[0, pair] = 1
    angle, want = 60 * 100.0 ** (-2 * pair / 8), np.zeros((1, 8))
    want[0, pair], want[0, pair + 4] = np.cos(angle), np.sin(angle)
    np.testing.assert_allclose(
        numbers(llm.apply_rope(mx.array(x)[None], 60, 100.0)[0]), want, atol=2e-5
    )


LENGTHS = [
    (1, 1),
    (1, 9),
    (5, 5),
    (4, 11),
    (2, 60),
    (60, 60),
    *[(L, S) for L in (1, 3) for S in (1023, 1024, 1025)],
]


@both_paths
@both_types
@pytest.mark.parametrize("heads", [(4, 1), (6, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("L, S", LENGTHS)
def test_attend(L, S, heads, dtype, plain):
    """Any number of new rows after any past, each sees all before it. In bfloat16 the fused kernel of a CPU rounds the scores, so
    it is held to 4 roundings, the spelled-out math, which keeps them in float32, to 3."""
    H, K = heads
    q, k, v = (
        normal(H, L, 16, dtype=dtype),
        normal(K, S, 16, dtype=dtype, seed=1),
        normal(K, S, 16, dtype=dtype, seed=2),
    )
    got = llm.dot_product_attention(q, k, v)
    assert got.dtype == dtype
    assert off(got, oracle_attend(*map(numbers, (q, k, v)))) < (
        2e-6 if dtype == F32 else (1.5 if plain else 2) * STEP[BF16]
    )


@both_types
@pytest.mark.parametrize("S", [1, 60, 1023, 1024, 1025])
def test_spelled_out_equals_fused(monkeypatch, S, dtype):
    """What the fused kernels compute is what the file spells out: norm, rotation and attention of the last rows of S.

    In bfloat16 within 6 roundings; test_attend holds each to the truth, within 3 and 4.
    """
    L, bound = min(S, 5), 2e-6 if dtype == F32 else 3 * STEP[BF16]
    x, weight = normal(4, L, 32, dtype=dtype), normal(32, dtype=dtype, seed=3)
    k, v = normal(2, S, 32, dtype=dtype, seed=1), normal(2, S, 32, dtype=dtype, seed=2)
    found = {}
    for fused in (True, False):
        monkeypatch.setattr(llm, "FUSED", fused)
        found[fused] = [
            llm.rms_norm(x, weight, 1e-6),
            llm.dot_product_attention(x, k, v),
            llm.apply_rope(x, S - L, 1e6),
        ]
        mx.eval(found[fused])
    bounds = bound, bound, bound + S * 2**-22
    for spelled, fused, allowed in zip(found[False], found[True], bounds):
        assert off(spelled, fused) < allowed


@both_types
@pytest.mark.parametrize("L", [1, 5])
def test_large_matrices(L, dtype):
    """Above 2^20 numbers a CPU computes in two halves: x W^T all the same, odd rows too."""
    x, W = normal(L, 1024, dtype=dtype), normal(1025, 1024, dtype=dtype, seed=1)
    got = llm.linear(x, {"m.weight": W}, "m")
    assert got.shape == (L, 1025) and got.dtype == dtype
    assert off(got, numbers(x) @ numbers(W).T) < (2e-6 if dtype == F32 else STEP[BF16])


@both_types
@pytest.mark.parametrize("L", [1, 7])
def test_ffn(tmp_path, L, dtype):
    """SwiGLU for one row and for many; inputs large enough that silu, gelu and relu part company."""
    weights, config, _ = model(tmp_path, dtype=dtype)
    x = 3 * normal(L, 64, dtype=dtype)
    want = oracle_ffn(numbers(x), {name: numbers(array) for name, array in weights.items()}, 1)
    got = llm.ffn(x, weights, 1)
    assert got.dtype == dtype and off(got, want) < (2e-6 if dtype == F32 else 3 * STEP[BF16])


@both_types
@pytest.mark.parametrize("L", [1, 2, 7])
def test_linear(L, dtype):
    """y = x W^T for one row and for many: rows in, rows out."""
    x, W = normal(L, 48, dtype=dtype), normal(20, 48, dtype=dtype, seed=1)
    got = llm.linear(x, {"some.matrix.weight": W}, "some.matrix")
    assert got.shape == (L, 20) and got.dtype == dtype
    assert off(got, numbers(x) @ numbers(W).T) < (1e-6 if dtype == F32 else STEP[BF16])


@pytest.mark.parametrize("bits, group_size", [(2, 32), (4, 64), (8, 128)])
def test_embed(bits, group_size):
    """Rows of the table, quantized or not, are the same numbers; in the order asked for."""
    W, name, config = normal(10, 128), "model.embed_tokens", {"hidden_size": 128}
    parts = mx.quantize(W, group_size=group_size, bits=bits)
    quantized = dict(zip((f"{name}.weight", f"{name}.scales", f"{name}.biases"), parts))
    want = mx.dequantize(*parts, group_size=group_size, bits=bits)
    assert mx.array_equal(llm.embed([7, 0], {f"{name}.weight": W}, config), W[mx.array([7, 0])])
    assert mx.array_equal(llm.embed(mx.array([7, 0]), quantized, config), want[mx.array([7, 0])])
    assert llm.matrix({f"{name}.weight": W}, name, 128) == (W, {})
    packed, packing = llm.matrix(quantized, name, 128)
    assert mx.array_equal(mx.dequantize(packed, **packing), want)
    assert (packing["group_size"], packing["bits"]) == (group_size, bits)


@both_types
@pytest.mark.parametrize("L, S", [(1, 1), (1, 9), (5, 5), (4, 11)])
@pytest.mark.parametrize("heads", [(4, 1), (6, 3), (2, 2)], ids=str)
def test_attention_weights(L, S, heads, dtype):
    """Each row adds up to 1, is zero after its token, and is what the oracle has."""
    H, K = heads
    q, k = normal(H, L, 16, dtype=dtype), normal(K, S, 16, dtype=dtype, seed=1)
    p = llm.attention_weights(q, k)
    assert p.shape == (H, L, S) and p.dtype == dtype
    np.testing.assert_allclose(numbers(p).sum(-1), 1, atol=1e-5 if dtype == F32 else S * 2**-9)
    assert not np.triu(numbers(p), S - L + 1).any()
    # values that are unit vectors give the weights themselves
    eye = mx.broadcast_to(mx.eye(S, dtype=dtype), (K, S, S))
    want = oracle_attend(numbers(q), numbers(k), numbers(eye))
    assert off(p, want) < (2e-6 if dtype == F32 else 1.5 * STEP[BF16])


@both_paths
def test_rope_with_an_offset_for_each_text(plain):
    """B texts at once, each with its own offset, turn as each of them alone does."""
    x, offsets = normal(3, 4, 2, 16), [5, 900, 0]
    shape = (3, 1, 1) if plain else (3,)
    turned = llm.apply_rope(x, mx.array(offsets).reshape(shape), 1e6)
    for one, offset, got in zip(x, offsets, turned):
        assert off(got, llm.apply_rope(one, offset, 1e6)) < 2e-6


@both_paths
@pytest.mark.parametrize("function", ["attention", "transformer_block"])
@pytest.mark.parametrize("split", [1, 4, 10, 11])
def test_blocks_in_two_chunks(tmp_path, function, split, plain):
    """Each row of the second chunk sees the first chunk and itself, neither less nor more: all rows equal the oracle's."""
    weights, config, written = model(tmp_path)
    w, x, cache = (
        {name: numbers(array) for name, array in weights.items()},
        normal(11, 64),
        llm.make_cache(weights, config, 12),
    )
    want = {"attention": oracle_attention, "transformer_block": oracle_block}[function](
        numbers(x), w, written, 1
    )
    parts = [
        getattr(llm, function)(x[start:end], weights, config, 1, cache, start)
        for start, end in ((0, split), (split, 11))
        if start < end
    ]
    assert off(mx.concatenate(parts), want) < 5e-6


# ---- The cache


def test_make_cache(tmp_path):
    """A pair per layer, (K, size, head_dim) each, in the weights' type."""
    weights, config, _ = model(
        tmp_path, dtype=BF16, num_hidden_layers=3, num_key_value_heads=1, head_dim=24
    )
    cache = llm.make_cache(weights, config, 17)
    assert [[(a.shape, a.dtype) for a in pair] for pair in cache] == [[((1, 17, 24), BF16)] * 2] * 3


@both_paths
@pytest.mark.parametrize("split", range(1, 11))
def test_cached_equals_uncached_at_every_split(tmp_path, split, plain):
    """`split` tokens and then one at a time, or the rest at once: every row as if there were no cache (and by the oracle)."""
    weights, config, written = model(tmp_path, num_hidden_layers=3)
    ids = random_ids(11)
    want, cache = oracle(ids, weights, written), llm.make_cache(weights, config, 11)
    got = [llm.forward(ids[:split], weights, config, cache, 0)]
    got += [llm.forward(ids[i : i + 1], weights, config, cache, i) for i in range(split, 11)]
    for row, logits in enumerate(got, split - 1):
        assert off(logits, logits_of(ids[: row + 1], weights, config)) < 5e-6, f"row {row}"
        assert off(logits, want[row]) < 1e-5, f"row {row}"
    cache = llm.make_cache(weights, config, 11)
    llm.forward(ids[:split], weights, config, cache, 0)
    assert off(llm.forward(ids[split:], weights, config, cache, split), want[-1]) < 1e-5


@both_paths
@pytest.mark.parametrize("chunk", [1, 2, 7, 29, 30])
def test_chunked_prefill_equals_unchunked(tmp_path, monkeypatch, chunk, plain):
    """Chunks never exceed CHUNK, and leave in every layer the keys and values that a single pass leaves."""
    weights, config, _ = model(tmp_path, num_hidden_layers=3)
    ids, whole, parts = random_ids(30), *[llm.make_cache(weights, config, 30) for _ in range(2)]
    llm.forward(ids, weights, config, whole, 0)
    monkeypatch.setattr(llm, "CHUNK", chunk)
    calls = record_forward(monkeypatch)
    list(llm.generate(ids, weights, config, [], 1, cache=parts))
    assert calls == [(start, min(chunk, 30 - start)) for start in range(0, 30, chunk)]
    for layer in range(3):
        assert max(off(a, b) for a, b in zip(parts[layer], whole[layer])) < 5e-6, f"layer {layer}"


# ---- Generation


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """An untied random model, a prompt, and the oracle's greedy answer, of different tokens, each chosen by a clear margin."""
    weights, config, written = model(
        tmp_path_factory.mktemp("walk"), seed=11, tie_word_embeddings=False
    )
    prompt, answer = random_ids(9), []
    for _ in range(12):
        logits = oracle(prompt + answer, weights, written)[-1]
        first, second = np.sort(logits)[[-1, -2]]
        assert first - second > 0.01 * first
        answer.append(int(logits.argmax()))
    assert len(set(answer)) == 12
    return weights, config, prompt, answer


@both_paths
@pytest.mark.parametrize("chunk", [4, 512])
def test_greedy_is_the_argmax_chain(walk, monkeypatch, chunk, plain):
    """At temperature 0, generate is the chain of the oracle's best tokens."""
    weights, config, prompt, answer = walk
    monkeypatch.setattr(llm, "CHUNK", chunk)
    assert list(llm.generate(prompt, weights, config, [], 12)) == answer


@pytest.mark.parametrize("kind", [list, set, tuple])
@pytest.mark.parametrize("place", [0, 3, 11])
def test_a_stop_id_ends_the_answer(walk, place, kind):
    """The first stop id ends it and is not yielded; other stop ids do not matter."""
    weights, config, prompt, answer = walk
    before = answer[: answer.index(answer[place])]
    assert list(llm.generate(prompt, weights, config, kind([299_999, answer[place]]), 12)) == before


@pytest.mark.parametrize("count", [1, 2, 5])
def test_max_tokens(walk, monkeypatch, count):
    """Exactly so many tokens for so many passes: the last token is not fed for nothing."""
    weights, config, prompt, answer = walk
    calls = record_forward(monkeypatch)
    assert list(llm.generate(prompt, weights, config, [], count)) == answer[:count]
    assert calls == [(0, 9)] + [(9 + i, 1) for i in range(count - 1)]


def test_the_next_step_is_queued_before_the_token_is_read(walk, monkeypatch):
    """When the first token arrives, the pass for the second one has already been built."""
    weights, config, prompt, answer = walk
    calls = record_forward(monkeypatch)
    assert next(llm.generate(prompt, weights, config, [], 12)) == answer[0]
    assert calls == [(0, 9), (9, 1)]


@pytest.mark.parametrize("limit", [9, 10, 14])
def test_the_context_limit_ends_the_answer(walk, monkeypatch, limit):
    """No position at or past max_position_embeddings is ever fed, and the room before it is used."""
    weights, config, prompt, answer = walk
    calls = record_forward(monkeypatch)
    got = list(llm.generate(prompt, weights, config | {"max_position_embeddings": limit}, [], 100))
    assert max(offset + count for offset, count in calls) <= limit
    assert got == answer[: len(got)] and limit - 9 <= len(got) <= limit - 9 + 1


@pytest.mark.parametrize("offset", [0, 5])
def test_a_prompt_past_the_context_is_refused(walk, offset):
    """The limit is named; what a given cache holds counts."""
    weights, config, prompt, _ = walk
    config = config | {"max_position_embeddings": offset + 8}
    with pytest.raises(ValueError, match=rf"\b{offset + 8}\b"):
        next(
            llm.generate(
                prompt,
                weights,
                config,
                [],
                5,
                cache=llm.make_cache(weights, config, 20),
                offset=offset,
            )
        )


@pytest.mark.parametrize("prompt", [[], [-1], [5, 300], [300, 5], [2**31], [-(2**40)]], ids=str)
def test_ids_that_do_not_exist_are_refused(walk, prompt):
    """An empty prompt or an id without an embedding row is a ValueError, not garbage."""
    weights, config, *_ = walk
    with pytest.raises(ValueError):
        next(llm.generate(prompt, weights, config, [], 5))


def test_the_last_id_of_the_vocabulary_exists(walk):
    """0 and V - 1 are both fine."""
    weights, config, *_ = walk
    assert len(list(llm.generate([0, 299], weights, config, [], 3))) == 3


@both_paths
@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.norm", "model.layers.0.self_attn.k_norm", "lm_head"])
def test_damaged_weights_stop_the_answer(walk, name, value, temperature, plain):
    """One NaN or infinity: logits that are not finite end the answer before its first token."""
    weights, config, prompt, _ = walk
    damaged = np.array(weights[f"{name}.weight"])
    damaged.reshape(-1)[3] = value
    with pytest.raises(ValueError, match="not finite"):
        next(
            llm.generate(
                prompt,
                weights | {f"{name}.weight": mx.array(damaged)},
                config,
                [],
                5,
                temperature=temperature,
            )
        )


def test_what_came_before_the_damage_is_kept(walk):
    """A NaN that only the third token meets lets two tokens through, and the third itself."""
    weights, config, prompt, answer = walk
    assert answer[2] not in prompt + answer[:2]
    damaged, got = np.array(weights["model.embed_tokens.weight"]), []
    damaged[answer[2]] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        for token_id in llm.generate(
            prompt, weights | {"model.embed_tokens.weight": mx.array(damaged)}, config, [], 12
        ):
            got.append(token_id)
    assert got == answer[:3]


@both_paths
@pytest.mark.parametrize("held", [1, 5, 8])
def test_a_given_cache_is_continued(walk, held, plain):
    """A cache that holds the first tokens gives the same answer as the whole prompt, and can then go on again."""
    weights, config, prompt, answer = walk
    config, cache = config, llm.make_cache(weights, config, 40)
    llm.forward(prompt[:held], weights, config, cache, 0)
    assert (
        list(llm.generate(prompt[held:], weights, config, [], 5, cache=cache, offset=held))
        == answer[:5]
    )
    # the answer's last token has not been fed: it comes with the next turn
    assert (
        list(llm.generate([answer[4]], weights, config, [], 7, cache=cache, offset=13))
        == answer[5:]
    )


@pytest.mark.parametrize("size", [0, 1, 8, 9, 12])
def test_a_given_cache_that_is_too_small_grows(walk, size):
    """Room for fewer tokens than asked for: the caller's own list grows, and holds every token but the last."""
    weights, config, prompt, answer = walk
    cache, roomy = llm.make_cache(weights, config, size), llm.make_cache(weights, config, 20)
    assert list(llm.generate(prompt, weights, config, [], 12, cache=cache)) == answer
    llm.forward(prompt + answer[:11], weights, config, roomy, 0)
    for pair, whole in zip(cache, roomy):
        assert all(off(rows[:, :20], want) < 1e-5 for rows, want in zip(pair, whole))


@both_paths
def test_a_cache_that_grows_in_the_middle_keeps_the_past(walk, plain):
    """Room for the first tokens of a dialogue only: what is held stays where it is."""
    weights, config, prompt, answer = walk
    cache = llm.make_cache(weights, config, 5)
    llm.forward(prompt[:5], weights, config, cache, 0)
    assert list(llm.generate(prompt[5:], weights, config, [], 12, cache=cache, offset=5)) == answer


def test_generate_draws_by_the_seed(walk):
    """The same seed gives the same text, other seeds other texts."""
    weights, config, prompt, _ = walk

    def text(seed):
        return tuple(llm.generate(prompt, weights, config, [], 10, seed=seed, temperature=1.0))

    assert text(1) == text(1) and len({text(seed) for seed in range(5)}) == 5


def test_generate_hands_the_filters_on(walk):
    """top_k 1 or top_p 0 makes a hot draw the greedy answer."""
    weights, config, prompt, answer = walk
    assert list(llm.generate(prompt, weights, config, [], 12, temperature=5.0, top_k=1)) == answer
    assert list(llm.generate(prompt, weights, config, [], 12, temperature=5.0, top_p=0.0)) == answer


# ---- Types


@both_paths
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["float32", "bfloat16", "float16"])
def test_everything_keeps_the_weights_type(tmp_path, monkeypatch, dtype, plain):
    """What each function returns, the cache and the logits, in prefill and decode: nothing is promoted."""
    weights, config, _ = model(tmp_path, dtype)
    seen = {}
    for name in (
        "rms_norm",
        "apply_rope",
        "dot_product_attention",
        "attention",
        "ffn",
        "transformer_block",
        "linear",
        "embed",
    ):

        def wrapped(*arguments, original=getattr(llm, name), name=name, **named):
            result = original(*arguments, **named)
            seen.setdefault(name, set()).add(result.dtype)
            return result

        monkeypatch.setattr(llm, name, wrapped)
    cache = llm.make_cache(weights, config, 9)
    for ids, offset in (random_ids(8), 0), ([5], 8):
        assert llm.forward(ids, weights, config, cache, offset).dtype == dtype
    assert {a.dtype for pair in cache for a in pair} == {dtype}
    assert seen == {name: {dtype} for name in seen} and len(seen) == 8


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["float32", "float16", "bfloat16"])
def test_load_converts(tmp_path, dtype):
    """load(folder, dtype) converts every tensor; bfloat16 numbers survive in float32 to the last bit."""
    written = checkpoints.make_config(**SMALL)
    stored = checkpoints.random_weights(written, BF16)
    weights, config, _ = llm.load(checkpoints.write_checkpoint(tmp_path, written, stored), dtype)
    assert {a.dtype for a in weights.values()} == {dtype} and logits_of(
        [1, 2], weights, config
    ).dtype == dtype
    assert all(mx.array_equal(weights[name], array.astype(dtype)) for name, array in stored.items())


@both_paths
@pytest.mark.parametrize("odd", ["model.norm", "layernorm", "_norm", "q_proj", "down_proj"])
def test_a_mixed_checkpoint_is_not_promoted(tmp_path, odd, plain):
    """A few float32 tensors in a bfloat16 checkpoint do not make the rest float32: cache and logits stay as most weights are."""
    written = checkpoints.make_config(**SMALL)
    stored = {
        name: array.astype(F32 if f"{odd}.weight" in name else BF16)
        for name, array in checkpoints.random_weights(written).items()
    }
    assert {array.dtype for array in stored.values()} == {F32, BF16}
    weights, config, _ = llm.load(checkpoints.write_checkpoint(tmp_path, written, stored))
    cache = llm.make_cache(weights, config, 3)
    logits = llm.forward([1, 2, 3], weights, config, cache, 0)
    assert {logits.dtype, *[array.dtype for pair in cache for array in pair]} == {BF16}


# ---- Sampling


def exact(logits, temperature, top_p, top_k):
    """The distribution asked for, in float64: temperature, then top-k, then the smallest set that reaches top-p of what is left."""
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    p = np.exp((logits[order] - logits.max()) / temperature)
    p /= p.sum()
    p = np.where(np.cumsum(p) - p < top_p, p, 0)
    result = np.zeros(len(logits))
    result[order] = p / p.sum()
    return result


def draws(logits, count, *options, seed=0):
    """That many samples, each with a key of its own, as a NumPy array."""
    keys = mx.random.split(mx.random.key(seed), count)
    return np.concatenate(
        [
            np.array(
                mx.stack([llm.sample(logits, *options, key=key) for key in keys[at : at + 500]])
            )
            for at in range(0, count, 500)
        ]
    )


ODDS = np.array([0.05, 0.30, 0.02, 0.22, 0.08, 0.18, 0.15])


@both_types
@pytest.mark.parametrize("temperature", [0, 0.0, 1e-45, 1e-9])
@pytest.mark.parametrize("top_p, top_k", [(1.0, 0), (0.9, 0), (1.0, 3), (0.9, 3)])
def test_no_temperature_is_argmax(temperature, top_p, top_k, dtype):
    """Zero and all but zero choose the best token: a scalar, still on the device."""
    for seed in range(5):
        logits = (20 * normal(50, seed=seed)).astype(dtype)
        token = llm.sample(logits, temperature, top_p, top_k)
        assert (
            isinstance(token, mx.array)
            and token.shape == ()
            and token.item() == int(np.argmax(numbers(logits)))
        )


@pytest.mark.parametrize(
    "temperature, top_p, top_k",
    [
        (1.0, 1.0, 0),
        (0.5, 1.0, 0),
        (2.0, 1.0, 0),
        (1.0, 1.0, 3),
        (1.0, 1.0, 7),
        (1.0, 0.45, 0),
        (1.0, 0.8, 0),
        (1.0, 0.97, 0),
        (1.5, 0.8, 4),
        (0.7, 0.6, 3),
        (1.0, 0.8, 2),
        (0.3, 0.999, 6),
    ],
)
def test_frequencies_are_the_exact_distribution(temperature, top_p, top_k):
    """2,000 draws: each count within 5 standard deviations of its own (by chance 1 in a million goes farther), none where p is 0."""
    logits, count = np.log(ODDS) + 3, 2000
    p = exact(logits, temperature, top_p, top_k)
    counts = np.bincount(
        draws(mx.array(logits.astype(np.float32)), count, temperature, top_p, top_k), minlength=7
    )
    assert (np.abs(counts - count * p) <= 5 * np.sqrt(count * p * (1 - p))).all(), (
        counts / count,
        p,
    )


@pytest.mark.parametrize(
    "temperature, top_p, top_k, survivors",
    [
        (1.0, 0.5, 2, {0}),  # of the best two the first has 0.57; were top-p first, both would stay
        (
            1.0,
            0.72,
            3,
            {0, 1},
        ),  # 0.47 + 0.35 of the best three; were top-p first, all three would stay
        (
            4.0,
            0.6,
            0,
            {0, 1, 2},
        ),  # 0.25 + 0.23 + 0.20 of all when flattened; were temperature last, two would do
    ],
)
def test_the_order_is_temperature_top_k_top_p(temperature, top_p, top_k, survivors):
    """The set that is drawn from tells the order of the filters."""
    logits = mx.log(mx.array([0.4, 0.3, 0.15, 0.1, 0.05]))
    assert set(draws(logits, 300, temperature, top_p, top_k)) == survivors


@pytest.mark.parametrize(
    "top_p, kept",
    [
        (0.125, 1),
        (0.1251, 2),
        (0.2499, 2),
        (0.25, 2),
        (0.5, 4),
        (0.5001, 5),
        (0.875, 7),
        (0.9999, 8),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    """Eight equal tokens have exactly 1/8 each: a token before which there is exactly top_p already is dropped."""
    assert len(set(draws(mx.zeros(8), 300, 1.0, top_p))) == kept


@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
@pytest.mark.parametrize(
    "top_p, top_k", [(0.0, 0), (1e-45, 0), (1e-12, 0), (0.0, 3), (1.0, 1), (0.5, 1), (0.0, 1)]
)
def test_the_narrowest_filters_leave_the_best(monkeypatch, temperature, top_p, top_k):
    """top_p 0 and top_k 1 never empty the set (a draw from nothing gives any id, by luck the right one): the best token stays."""
    logits, categorical, left = normal(40), mx.random.categorical, []
    monkeypatch.setattr(
        mx.random,
        "categorical",
        lambda x, *more, **named: left.append(x) or categorical(x, *more, **named),
    )
    assert set(draws(logits, 40, temperature, top_p, top_k)) == {int(np.argmax(numbers(logits)))}
    assert all(mx.isfinite(x).any().item() for x in left)


@pytest.mark.parametrize("top_k", [7, 8, 10**9])
def test_top_k_beyond_the_vocabulary_filters_nothing(top_k):
    """All seven tokens can still be drawn, and nothing else."""
    assert set(draws(mx.zeros(7), 300, 1.0, 1.0, top_k)) == set(range(7))
    assert set(draws(mx.zeros(7), 300, 1.0, 0.9999, top_k)) == set(range(7))


@pytest.mark.parametrize("top_k", [0, 2, 3])
def test_top_p_1_excludes_nothing(top_k):
    """The best has 1 in float32 already, so that the others come after a sum of 1: they stay."""
    logits = mx.array([0.0, 100.0, -5.0])
    kept = np.isfinite(np.array(llm.filter_logits(logits, 1.0, top_k)))
    assert kept.tolist() == [True, True, top_k != 2]


def test_bfloat16_logits_keep_the_same_set():
    """4,096 nearly equal tokens: added up in bfloat16, their probabilities would stop at 1/16 and keep the lower half too."""
    upper = np.random.default_rng(0).permutation(4096) < 2048
    logits = mx.array(np.where(upper, 0.0, -(2**-7)).astype(np.float32)).astype(BF16)
    drawn = draws(logits, 300, 1.0, 0.5)
    assert upper[drawn].all() and (drawn == draws(logits.astype(F32), 300, 1.0, 0.5)).all()


def test_the_seed_decides_the_draws():
    """The same seed gives the same draws, another seed others; and one draw differs from the next."""
    first = draws(mx.zeros(1000), 20, 1.0, 0.9, 500, seed=3)
    assert (first == draws(mx.zeros(1000), 20, 1.0, 0.9, 500, seed=3)).all()
    assert (first != draws(mx.zeros(1000), 20, 1.0, 0.9, 500, seed=4)).any()
    assert len(set(first)) > 10


def test_without_a_key_draws_differ():
    """One draw differs from the next, for MLX's own random state moves on."""
    assert len({llm.sample(mx.zeros(1000), 1.0).item() for _ in range(20)}) > 10


# ---- Loading


@pytest.fixture
def folder(tmp_path):
    """A small sound checkpoint that a test may spoil."""
    return checkpoints.write_checkpoint(tmp_path / "model", TINY)


def edit(path, **changes):
    """Change a JSON file's keys; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_weights(folder, change):
    """Let `change` alter the dict of tensors, and write it back."""
    path = folder / "model.safetensors"
    weights = {name: mx.array(array) for name, array in mx.load(str(path)).items()}
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(path), weights)


def refusal(folder):
    """The message with which check refuses the folder, without the folder's own path; it is short."""
    with pytest.raises(ValueError) as caught:
        check.check(folder)
    message = str(caught.value).replace(str(folder), "")
    assert len(message) < 500
    return message


def logits_from(folder):
    """What a sound checkpoint answers: logits after five ids."""
    check.check(folder)
    weights, config, _ = llm.load(folder)
    return logits_of([9, 8, 7, 6, 5], weights, config)


@pytest.mark.parametrize("kind", [str, Path])
def test_load(folder, kind):
    """All tensors under their published names, the config's own keys, and the tokenizer."""
    weights, config, tokenizer = llm.load(kind(folder))
    stored = mx.load(str(folder / "model.safetensors"))
    assert weights.keys() == stored.keys() and all(
        mx.array_equal(weights[name], stored[name]) for name in stored
    )
    assert all(config[key] == TINY[key] for key in TINY if key != "eos_token_id")
    assert tokenizer.decode(tokenizer.encode("The capital").ids) == "The capital"


@pytest.mark.parametrize(
    "layout",
    [
        dict(rope_theta=None, rope_parameters={"rope_theta": 3000.0, "rope_type": "default"}),
        dict(rope_theta=None, rope_parameters={"rope_theta": 3000}),
        dict(
            rope_theta=None,
            rope_scaling=None,
            rope_parameters={"rope_theta": 3000.0, "rope_type": "default"},
        ),
        dict(rope_scaling={"rope_type": "default"}),
        dict(rope_scaling={"type": "default"}),
        dict(rope_scaling={}),
    ],
    ids=str,
)
def test_both_layouts_of_rope_theta(folder, layout):
    """rope_theta of its own, or within rope_parameters: the same logits, which another theta does not give."""
    edit(folder / "config.json", rope_theta=3000)
    want = logits_from(folder)
    edit(folder / "config.json", rope_theta=1000000)
    assert off(logits_from(folder), want) > 1e-3
    edit(folder / "config.json", **{"rope_theta": 3000} | layout)
    assert mx.array_equal(logits_from(folder), want)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        dict(rope_parameters={"rope_type": "default"}),
        dict(rope_scaling={"rope_type": "default"}),
    ],
    ids=str,
)
def test_no_rope_theta_is_refused(folder, layout):
    """Without a theta there is no silent default."""
    edit(folder / "config.json", rope_theta=None, **layout)
    assert "rope_theta" in refusal(folder)
    with pytest.raises(KeyError, match="rope_theta"):
        next(llm.generate([1, 2], *llm.load(folder)[:2], []))


YARN, MOE = (
    {"factor": 4.0, "original_max_position_embeddings": 32768},
    dict(num_experts=128, num_experts_per_tok=8),
)
SIZES = [
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
]
REFUSED = {
    "yarn": dict(rope_scaling={"rope_type": "yarn"} | YARN),
    "yarn of old": dict(rope_scaling={"type": "yarn"} | YARN),
    "yarn in parameters": dict(
        rope_theta=None, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6} | YARN
    ),
    "linear": dict(rope_scaling={"type": "linear", "factor": 2.0}),
    "linear in parameters": dict(rope_parameters={"rope_type": "linear", "factor": 2.0}),
    "fp8": dict(
        quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    ),
    "awq": dict(
        quantization_config={
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
        }
    ),
    "gptq": dict(
        quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    ),
    "bitsandbytes": dict(
        quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}
    ),
    "mxfp4": dict(quantization={"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    "nvfp4": dict(quantization={"group_size": 16, "bits": 4, "mode": "nvfp4"}),
    "mxfp4 in quantization_config": dict(
        quantization_config={"group_size": 32, "bits": 4, "mode": "mxfp4"}
    ),
    "qwen3_moe": dict(model_type="qwen3_moe", **MOE),
    "qwen2": dict(model_type="qwen2"),
    "llama": dict(model_type="llama"),
    "qwen3_5": dict(model_type="qwen3_5", text_config=TINY, **dict.fromkeys(SIZES)),
    "gelu": dict(hidden_act="gelu"),
    "attention_bias": dict(attention_bias=True),
    "use_sliding_window": dict(use_sliding_window=True),
}


@pytest.mark.parametrize("found", REFUSED)
def test_other_models_are_refused_by_name(folder, found):
    """What was found is named, from the config alone: the weights are not even there. load says so
    too, since it would run some of them, and wrongly."""
    edit(folder / "config.json", **REFUSED[found])
    (folder / "model.safetensors").unlink()
    message = refusal(folder)
    assert found.split()[0] in message and "config.json" in message
    with pytest.raises(ValueError, match=found.split()[0]):
        llm.load(folder)


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [None, "64"], ids=["missing", "text"])
def test_a_size_that_is_not_there_is_named(folder, key, value):
    """No size has a silent default."""
    edit(folder / "config.json", **{key: value})
    assert key in refusal(folder)


def test_tied_ignores_a_left_over_head(folder):
    """The 0.6B file stores lm_head.weight though it is tied: the config decides, even if the head's numbers differ."""
    want = logits_from(folder)
    edit_weights(folder, lambda w: w.update({"lm_head.weight": normal(100, 64, seed=9)}))
    assert mx.array_equal(logits_from(folder), want)
    assert not any("lm_head" in name for name in llm.load(folder)[0])


def test_untied_uses_its_head(folder):
    """With tie_word_embeddings false, lm_head.weight alone makes the logits; without the key it is untied too, as in the 8B."""
    head = normal(100, 64, seed=9)
    edit_weights(folder, lambda w: w.update({"lm_head.weight": head}))
    stored = mx.load(str(folder / "model.safetensors"))
    want = oracle([9, 8, 7, 6, 5], stored, TINY | {"tie_word_embeddings": False})[-1]
    for tied in False, None:
        edit(folder / "config.json", tie_word_embeddings=tied)
        assert off(logits_from(folder), want) < 1e-5


def test_untied_without_a_head_is_refused(folder):
    """The missing tensor is named."""
    edit(folder / "config.json", tie_word_embeddings=False)
    assert "lm_head" in refusal(folder)


def shard(folder, parts=3):
    """Split model.safetensors into listed shards, as published for the larger models; returns the shards' names."""
    weights = dict(mx.load(str(folder / "model.safetensors")))
    mx.eval(weights)
    files = [f"model-{i:05}-of-{parts:05}.safetensors" for i in range(1, parts + 1)]
    where = {name: files[i % parts] for i, name in enumerate(weights)}
    for file in files:
        mx.save_safetensors(
            str(folder / file),
            {name: array for name, array in weights.items() if where[name] == file},
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": where})
    )
    (folder / "model.safetensors").unlink()
    return files


def test_shards_equal_one_file(folder):
    """The same logits from shards."""
    want = logits_from(folder)
    shard(folder)
    assert mx.array_equal(logits_from(folder), want)


def test_a_missing_shard_is_named(folder):
    """A listed file that is not there is named."""
    file = shard(folder)[1]
    (folder / file).unlink()
    assert file in refusal(folder)


def test_a_missing_tensor_names_the_absent_shard(folder):
    """Three tensors by name, each with the file that would hold it, the rest as a count."""
    file = shard(folder)[1]
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    (folder / file).unlink()
    message, lost = refusal(folder), [name for name in where if where[name] == file]
    named = [name for name in lost if name.removesuffix(".weight") in message]
    assert message.count(file) == len(named) == 3 < len(lost)
    assert re.search(rf"\b{len(lost)}\b", message)


def test_shards_need_no_index(folder):
    """Without an index every model*.safetensors is read."""
    want = logits_from(folder)
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert mx.array_equal(logits_from(folder), want)


def test_an_index_of_other_files_does_not_count(folder):
    """A left-over index, all or some of whose files are not there, beside weights that are complete."""
    want = logits_from(folder)
    for files in ["gone.safetensors"], ["gone.safetensors", "model.safetensors"]:
        place = {f"t{number}": file for number, file in enumerate(files)}
        index = json.dumps({"weight_map": place})
        (folder / "model.safetensors.index.json").write_text(index)
        assert mx.array_equal(logits_from(folder), want)


def test_a_tensor_in_two_files_names_both(folder):
    """Nobody can tell which of the two is meant, even where they agree."""
    first, second, _ = shard(folder)
    tensors = {file: dict(mx.load(str(folder / file))) for file in (first, second)}
    name = next(iter(tensors[first]))
    mx.eval(tensors)
    both = tensors[second] | {name: tensors[first][name]}
    mx.save_safetensors(str(folder / second), both)
    message = refusal(folder)
    assert first in message and second in message and name in message


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_foreign_files_are_not_read(folder, shards):
    """macOS puts a ._file beside each file of an exFAT disk; other programs leave theirs."""
    want = logits_from(folder)
    if shards:
        shard(folder)
        (folder / "model.safetensors.index.json").unlink()
    for path in list(folder.iterdir()):
        (folder / f"._{path.name}").write_bytes(b"\x00\x05\x16\x07" * 20)
    for name in ".DS_Store", "adapters.safetensors", "chat_template.json", "vocab.json":
        (folder / name).write_bytes(b"\x00\x05\x16\x07" * 20)
    assert mx.array_equal(logits_from(folder), want)


def test_one_part_in_mxfp4_is_refused(folder):
    """The rest affine, and only a matrix's own entry in the config (or no entry) tells: tensor and reason, no download."""
    config = TINY | {"intermediate_size": 64}
    weights = checkpoints.random_weights(config)
    packed, config = checkpoints.quantize(weights, config, group_size=32)
    name = f"{LAYER}mlp.up_proj"
    del packed[f"{name}.biases"]
    packed[f"{name}.weight"], packed[f"{name}.scales"] = mx.quantize(
        weights[f"{name}.weight"], group_size=32, bits=4, mode="mxfp4"
    )
    for entry in {}, {name: {"group_size": 32, "bits": 4, "mode": "mxfp4"}}:
        plan = config["quantization"] | entry
        checkpoints.write_checkpoint(folder, config | {"quantization": plan}, packed)
        message = refusal(folder)
        assert name in message and re.search("mxfp4|stored|quantiz", message), message
        assert "download" not in message and re.search(r"\b1\b", message.replace(name, ""))


def test_f64_and_unknown_types_advise_no_download(folder):
    """MLX has no F64: the same file comes again, so the line says that it cannot be read, and why."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    for kind in "F64", "Q99":
        header = json.loads(data[8 : 8 + size])
        begin, end = header["model.norm.weight"]["data_offsets"]
        last = len(data) - 8 - size
        header["model.norm.weight"] |= {
            "dtype": kind,
            "data_offsets": [last, last + 2 * (end - begin)],
        }
        text = json.dumps(header).encode()
        body = data[8 + size :] + bytes(2 * (end - begin))
        path.write_bytes(len(text).to_bytes(8, "little") + text + body)
        message = refusal(folder)
        assert message.startswith("/model.safetensors cannot be read") and kind in message
        assert "download" not in message


def test_an_unknown_kind_of_tokenizer_advises_no_download(folder):
    """Sound JSON of a kind that the package tokenizers does not know."""
    edit(folder / "tokenizer.json", model={"type": "Telepathy", "thoughts": {}})
    message = refusal(folder)
    assert message.startswith("/tokenizer.json cannot be read") and "download" not in message


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, file):
    """A folder that lacks a file of the three says which."""
    (folder / file).unlink()
    assert refusal(folder).startswith(f"/{file}")


def test_no_folder_at_all(tmp_path):
    """A folder that does not exist is named, by load too."""
    with pytest.raises(ValueError, match="nowhere"):
        check.check(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        llm.load(tmp_path / "nowhere")


def store_as_f8(folder, name):
    """Store one matrix as F8_E4M3, which MLX reads as raw uint8 without a word."""
    edit_weights(folder, lambda w: w.update({name: w[name].astype(mx.uint8)}))
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header[name]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj", "model.embed_tokens"])
@pytest.mark.parametrize("real", [True, False], ids=["F8_E4M3", "uint8"])
def test_fp8_tensors_are_refused(folder, name, real):
    """FP8 is found by the tensors' type alone where the config does not tell."""
    if real:
        store_as_f8(folder, f"{name}.weight")
    else:
        edit_weights(
            folder, lambda w: w.update({f"{name}.weight": w[f"{name}.weight"].astype(mx.uint8)})
        )
    message = refusal(folder)
    assert name in message and re.search("uint8|fp8|f8", message, re.I)
    with pytest.raises(ValueError, match=f"{name}.weight is a bias, or .*uint8"):
        llm.load(folder)


LAYER = "model.layers.0."
DAMAGE = {
    "missing": (lambda w: w.pop(f"{LAYER}mlp.up_proj.weight"), f"{LAYER}mlp.up_proj"),
    "missing norm": (lambda w: w.pop("model.norm.weight"), "model.norm"),
    "missing QK-norm": (
        lambda w: w.pop(f"{LAYER}self_attn.k_norm.weight"),
        f"{LAYER}self_attn.k_norm",
    ),
    "transposed": (
        lambda w: w.update({f"{LAYER}mlp.up_proj.weight": mx.zeros((64, 48))}),
        f"{LAYER}mlp.up_proj",
    ),
    "QK-norm over all heads": (
        lambda w: w.update({f"{LAYER}self_attn.q_norm.weight": mx.zeros(32)}),
        f"{LAYER}self_attn.q_norm",
    ),
    "too many words": (
        lambda w: w.update({"model.embed_tokens.weight": mx.zeros((101, 64))}),
        "model.embed_tokens",
    ),
    "stray bias": (
        lambda w: w.update({f"{LAYER}self_attn.q_proj.bias": mx.zeros(32)}),
        f"{LAYER}self_attn.q_proj.bias",
    ),
    "unknown": (
        lambda w: w.update({"visual.patch_embed.weight": mx.zeros(3)}),
        "visual.patch_embed",
    ),
    "a layer too many": (
        lambda w: w.update({"model.layers.1.input_layernorm.weight": mx.zeros(64)}),
        "model.layers.1.input_layernorm",
    ),
    "integers": (
        lambda w: w.update({f"{LAYER}input_layernorm.weight": mx.zeros(64, mx.int32)}),
        f"{LAYER}input_layernorm",
    ),
}


def test_a_bias_is_never_left_out(folder):
    """load refuses it by itself, since the answer would be another one without a word."""
    edit_weights(folder, DAMAGE["stray bias"][0])
    with pytest.raises(ValueError, match="q_proj.bias"):
        llm.load(folder)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_tensor_that_does_not_fit_is_named(folder, damage):
    """Missing, misshapen, unknown: the tensor is named and counted as one."""
    change, name = DAMAGE[damage]
    edit_weights(folder, change)
    message = refusal(folder)
    assert name in message and re.search(r"\b1\b", message.replace(name, ""))


def test_many_faults_are_counted_and_the_first_few_named(folder):
    """Three missing, one misshapen, three unknown: seven is said, not all are listed."""

    def change(w):
        gone = [w.pop(f"{LAYER}mlp.{part}_proj.weight") for part in ("gate", "up", "down")]
        w.update(
            {"model.norm.weight": mx.zeros(63)}
            | {f"extra.{i}.weight": array for i, array in enumerate(gone)}
        )

    edit_weights(folder, change)
    message = refusal(folder)
    named = sum(
        name in message
        for name in (
            "gate_proj",
            "up_proj",
            "down_proj",
            "model.norm",
            "extra.0",
            "extra.1",
            "extra.2",
        )
    )
    assert re.search(r"\b7\b", message) and 2 <= named <= 4


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_half_a_quantized_matrix_is_named(folder, part):
    """A quantized matrix without its numbers, its scales or its biases is refused with its name."""
    name = f"{LAYER}self_attn.q_proj"
    packed = dict(
        zip(
            (f"{name}.weight", f"{name}.scales", f"{name}.biases"),
            mx.quantize(normal(32, 64), group_size=32, bits=4),
        )
    )
    packed.pop(f"{name}.{part}")
    edit_weights(folder, lambda w: (w.pop(f"{name}.weight"), w.update(packed)))
    assert name in refusal(folder)


OPTIONAL = "generation_config.json", "tokenizer_config.json"
FILES = "config.json", "tokenizer.json", "model.safetensors", *OPTIONAL
POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:"
    + "0123456789abcdef" * 4
    + "\nsize 1503300328\n"
)


@pytest.mark.parametrize("file", FILES)
def test_a_git_lfs_pointer_is_recognized(folder, file):
    """The file is named, what it is, and the command that gets the real one."""
    (folder / file).write_text(POINTER)
    message = refusal(folder)
    assert message.startswith(f"/{file}") and "LFS pointer" in message and "git lfs pull" in message


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("size", [-1000, -2, 20, 1, 0])
def test_a_cut_file_is_named(folder, file, size):
    """A download that broke off, a little or a lot too early, names the file and what to do."""
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[:size] if len(data) > -size else b"")
    message = refusal(folder)
    assert (
        message.startswith(f"/{file}")
        and re.search("incomplete|damaged", message)
        and "again" in message
    )


def test_a_cut_shard_is_named(folder):
    """The same for a shard and for the index."""
    file = shard(folder)[2]
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[:-100])
    assert refusal(folder).startswith(f"/{file}")
    (folder / file).write_bytes(data)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text()[:-30])
    assert refusal(folder).startswith(f"/{index.name}")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", *OPTIONAL])
@pytest.mark.parametrize(
    "content", [b"{", b"{'a': 1}", b"\xff\xfe\x00", b"<!DOCTYPE html>"], ids=str
)
def test_broken_json_is_named(folder, file, content):
    """What is not JSON, such as a login page saved under the file's name, names the file."""
    (folder / file).write_bytes(content)
    assert refusal(folder).startswith(f"/{file}")


def test_a_missing_stop_token_is_not_the_word_none(folder):
    """Qwen's vocabulary has a token "None" (id 4064 there): no eos_token must not make it a stop id."""
    for name in ("config.json", *OPTIONAL):
        edit(folder / name, eos_token_id=None, eos_token=None)
    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    tokenizer["added_tokens"].append(
        {
            "id": 159,
            "content": "None",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": False,
        }
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    _, config, tokenizer = llm.load(folder)
    assert tokenizer.token_to_id("None") is not None and config["eos_token_id"] == []


@pytest.mark.parametrize(
    "file, key, value, want",
    [
        ("config.json", "eos_token_id", 7, [7]),
        ("config.json", "eos_token_id", [9, 7], [7, 9]),
        ("config.json", "eos_token_id", 0, [0]),
        ("generation_config.json", "eos_token_id", 7, [7]),
        ("generation_config.json", "eos_token_id", [9, 7], [7, 9]),
        ("tokenizer_config.json", "eos_token", "<|im_end|>", [2050]),
        ("tokenizer_config.json", "eos_token", "<|endoftext|>", [2048]),
        ("tokenizer_config.json", "eos_token", None, []),
    ],
)
def test_one_file_suffices_for_a_stop_id(folder, file, key, value, want):
    """Int, list, token text, in any of the three files, with the others silent or not there."""
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / file, **{key: value})
    assert sorted(llm.load(folder)[1]["eos_token_id"]) == want
    for other in OPTIONAL:
        if other != file:
            (folder / other).unlink()
    assert sorted(llm.load(folder)[1]["eos_token_id"]) == want


def test_the_stop_ids_of_all_files_count(folder):
    """The files disagree in what is published: each id that one of them names ends an answer."""
    edit(folder / "config.json", eos_token_id=5)
    edit(folder / "generation_config.json", eos_token_id=[6, 5])
    edit(folder / "tokenizer_config.json", eos_token="<|im_end|>")
    assert sorted(llm.load(folder)[1]["eos_token_id"]) == [5, 6, 2050]


# ---- Quantized checkpoints

WIDE = dict(
    hidden_size=128,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=160,
    num_hidden_layers=2,
    rms_norm_eps=1e-3,
)


def dequantized(packed):
    """The plain matrices (all 128 wide) of a quantized checkpoint: each number is q * scale + bias, q a run of bits, lowest first."""
    weights = {}
    for name, array in packed.items():
        stem, _, kind = name.rpartition(".")
        if kind == "weight" and f"{stem}.scales" in packed:
            scales, biases = (
                numbers(packed[f"{stem}.{part}"])[..., None] for part in ("scales", "biases")
            )
            bits = np.unpackbits(np.array(array).view(np.uint8), axis=1, bitorder="little").reshape(
                len(scales), 128, -1
            )
            q = (
                (bits * 2.0 ** np.arange(bits.shape[-1]))
                .sum(-1)
                .reshape(len(scales), scales.shape[1], -1)
            )
            array = mx.array((q * scales + biases).reshape(len(scales), 128).astype(np.float32))
        if kind == "weight":
            weights[name] = array
    return weights


def check_quantized(folder, packed, config, plain):
    """Seven rows at once, then single rows: as the oracle with the dequantized matrices, within 1e-5 of the largest logit."""
    weights, loaded, _ = llm.load(checkpoints.write_checkpoint(folder, config, packed))
    assert any(name.endswith(".scales") for name in weights)
    ids, cache = random_ids(10, 160), llm.make_cache(weights, loaded, 10)
    want = oracle(ids, dequantized(packed), config)
    for offset, count in (0, 7), (7, 1), (8, 1), (9, 1):
        got = llm.forward(ids[offset : offset + count], weights, loaded, cache, offset)
        assert off(got, want[offset + count - 1]) < 1e-5
        assert mx.argmax(got).item() == want[offset + count - 1].argmax()


@both_paths
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_quantized_equals_dequantized(tmp_path, bits, group_size, tied, plain):
    """Every width that mlx-lm writes, embedding (and so the tied head) included."""
    config = checkpoints.make_config(**WIDE, tie_word_embeddings=tied)
    packed, config = checkpoints.quantize(
        checkpoints.random_weights(config), config, bits, group_size
    )
    check_quantized(tmp_path, packed, config, plain)


@both_paths
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_mixed_bits_per_layer(tmp_path, tied, plain):
    """Some matrices with more bits, other groups, or not quantized at all, as mlx-lm's recipes leave them."""

    def choose(name):
        if "v_proj" in name or "lm_head" in name:
            return 6, 32
        if "embed" in name:
            return 8, 64
        return None if "layers.0.mlp" in name else (4, 128)

    config = checkpoints.make_config(**WIDE, tie_word_embeddings=tied)
    packed, config = checkpoints.quantize(
        checkpoints.random_weights(config), config, 4, 128, choose
    )
    check_quantized(tmp_path, packed, config, plain)


@both_paths
def test_quantized_tied_ignores_a_left_over_head(tmp_path, plain):
    """A quantized lm_head in a tied checkpoint is dropped whole: weight, scales and biases."""
    config = checkpoints.make_config(**WIDE)
    packed, config = checkpoints.quantize(checkpoints.random_weights(config), config)
    stray = zip(
        ("weight", "scales", "biases"), mx.quantize(normal(160, 128, seed=9), group_size=64, bits=4)
    )
    check_quantized(
        tmp_path, packed | {f"lm_head.{kind}": array for kind, array in stray}, config, plain
    )


@both_paths
@pytest.mark.parametrize("scales", [BF16, F16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_keeps_two_bytes(tmp_path, bits, scales, plain):
    """Cache and logits are as the norms and scales are; where these differ, of one of the two types, never float32."""
    config = checkpoints.make_config(**WIDE)
    packed, config = checkpoints.quantize(checkpoints.random_weights(config, BF16), config, bits)
    mixed = {
        name: array.astype(scales) if name.endswith(("scales", "biases")) else array
        for name, array in packed.items()
    }
    weights, loaded, _ = llm.load(checkpoints.write_checkpoint(tmp_path, config, mixed))
    cache = llm.make_cache(weights, loaded, 5)
    logits = llm.forward(random_ids(5, 160), weights, loaded, cache, 0)
    assert {logits.dtype, *[array.dtype for pair in cache for array in pair]} in ({BF16}, {scales})
    assert off(logits, oracle(random_ids(5, 160), dequantized(packed), config)[-1]) < 6 * 2**-8


# ---- Laziness and memory


def peak_of(work):
    """What `work` needs at most beyond what is held already, in bytes."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    return mx.get_peak_memory() - before


def test_a_conversion_does_not_hold_the_weights_twice(tmp_path):
    """load(folder, float32) of a bfloat16 checkpoint peaks little above the float32 weights; both at once would be 1.5 times."""
    config = checkpoints.make_config(hidden_size=256, num_hidden_layers=16, intermediate_size=1024)
    folder, kept = checkpoints.write_checkpoint(tmp_path, config, dtype=BF16), []
    peak = peak_of(lambda: kept.append(llm.load(folder, F32)))
    assert peak < 1.4 * sum(array.nbytes for array in kept[0][0].values())


@both_paths
def test_prefill_needs_the_head_for_one_row_only(monkeypatch, plain):
    """1,024 tokens in chunks of 128 and 32,768 words: logits of every row would be 134 MB, of a chunk 17 MB."""
    config = checkpoints.make_config(num_hidden_layers=2, vocab_size=32768)
    weights, ids = checkpoints.random_weights(config, BF16), random_ids(1024)
    monkeypatch.setattr(llm, "CHUNK", 128)
    assert peak_of(lambda: list(llm.generate(ids, weights, config, [], 2))) < 10e6


@both_paths
def test_prefill_memory_grows_with_the_chunk(monkeypatch, plain):
    """Chunks are run one after the other: 1,536 tokens need little more than twice what 768 need, not four times."""
    config = checkpoints.make_config(num_hidden_layers=2)
    weights = checkpoints.random_weights(config)
    monkeypatch.setattr(llm, "CHUNK", 64)
    short, long = (
        peak_of(lambda: list(llm.generate(random_ids(count), weights, config, [], 1)))
        for count in (768, 1536)
    )
    assert long < 2.2 * short


@both_paths
def test_decode_does_not_copy_the_cache(plain):
    """200 tokens beside a cache of 8 MB in one layer: a copy of its keys alone would be 4 MB."""
    config = checkpoints.make_config(num_hidden_layers=1, head_dim=64, vocab_size=300)
    weights = checkpoints.random_weights(config)
    cache = llm.make_cache(weights, config, 8192)
    mx.eval(cache)
    assert sum(a.nbytes for pair in cache for a in pair) == 2 * 2**22
    assert (
        peak_of(lambda: list(llm.generate(random_ids(8), weights, config, [], 200, cache=cache)))
        < 2e6
    )


def test_import_is_cheap_and_silent():
    """Importing prints nothing, allocates nothing and pulls in none of the heavy packages, wherever it is done."""
    code = (
        "import llm_inference, sys, mlx.core as mx\n"
        "assert mx.get_active_memory() == 0 and mx.get_peak_memory() == 0\n"
        "assert not {'huggingface_hub', 'transformers', 'torch', 'numpy'} & set(sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd="/",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


# ---- Trained weights


@both_paths
@pytest.mark.parametrize("dtype", [None, F32], ids=["as stored", "float32"])
def test_the_miniature_says_paris(plain, dtype):
    """The bundled miniature, trained by transformers, finishes the sentence."""
    weights, config, tokenizer = llm.load(checkpoints.MINI, dtype)
    ids = tokenizer.encode("The capital of France is").ids
    text = tokenizer.decode(list(llm.generate(ids, weights, config, config["eos_token_id"], 8)))
    assert text.startswith(" Paris")


@both_paths
def test_the_miniature_equals_the_oracle(plain):
    """Trained weights in float32, 60 tokens: within 1e-5 of the largest logit, as random ones."""
    weights, config, tokenizer = llm.load(checkpoints.MINI, F32)
    ids = (
        tokenizer.encode(
            "The capital of France is Paris. The capital of Japan is Tokyo. 法国的首都是巴黎。"
        ).ids
        * 6
    )[:60]
    want = oracle(ids, weights, json.loads((checkpoints.MINI / "config.json").read_text()))
    assert off(logits_of(ids, weights, config), want[-1]) < 1e-5


@pytest.fixture(scope="module")
def real():
    """The real weights, where somebody has put them."""
    if not (REAL / "model.safetensors").exists():
        pytest.skip(f"{REAL}/model.safetensors is not there: python -m examples.download gets it")
    return llm.load(REAL)


def test_real_prompt_ids(real):
    """The prompt's published ids; no token is put before it."""
    assert real[2].encode("The capital of France is").ids == [785, 6722, 315, 9625, 374]


@both_paths
def test_real_top_five(real, plain):
    """The published table of the next token's probabilities, within 0.01, in its order."""
    weights, config, tokenizer = real
    p = numbers(mx.softmax(logits_of([785, 6722, 315, 9625, 374], weights, config).astype(F32)))
    table = {"Paris": 0.6582, "located": 0.0274, "the": 0.0233, "...": 0.0157, "____": 0.0136}
    best = {tokenizer.decode([int(i)]).strip(): p[i] for i in np.argsort(-p)[:5]}
    assert best == pytest.approx(table, abs=0.01) and list(best)[0] == "Paris"


@both_paths
def test_real_greedy_text(real, plain):
    """The published continuation."""
    weights, config, tokenizer = real
    ids = [785, 6722, 315, 9625, 374]
    answer = list(llm.generate(ids, weights, config, config["eos_token_id"], 20))
    assert tokenizer.decode(ids + answer).startswith(
        "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid"
    )
