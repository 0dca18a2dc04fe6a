#!/usr/bin/env python3
"""llm_inference against transformers (and mlx-lm): logits, greedy tokens, sampling filters.

    python -m pytest tests/reference.py        needs torch, transformers, mlx-lm: .ci/run installs them for it
    python tests/reference.py --write          writes tests/expected.json, what transformers says on the miniature
The full-size comparison in float32 takes minutes on Linux without OpenBLAS in LD_PRELOAD, seconds with it.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM, TopKLogitsWarper, TopPLogitsWarper
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import checkpoints

import llm_inference

logging.disable_progress_bar()
MINI, EXPECTED = checkpoints.MINI, ROOT / "tests" / "expected.json"
FLOAT32_LIMIT = 1e-5  # of the largest logit; 5e-7 to 2e-6 were measured
BFLOAT16_FACTOR = 1.25  # our bfloat16 error over transformers'

# A bfloat16 number keeps 8 significant bits: one rounding moves a logit by up to 2^-9 of its size, and a few dozen of them
# lie between the embedding and the head. On the miniature the largest bfloat16 error of transformers itself, against its
# float32, is about 2^-6 of the largest logit; two logits can move towards each other, hence 2^-5: bfloat16 can blur a
# margin up to 3 % of the largest logit, and a choice with more than that must be the same everywhere.
BLUR = 2**-5


def reference(folder, dtype=torch.float32):
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    torch.set_num_threads(
        1 if model.config.hidden_size < 512 else os.cpu_count()
    )  # threads only slow a small one down
    return model


def reference_logits(model, ids):
    """(L, V) float32 NumPy: the logits at every position of `ids`."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def our_logits(weights, config, ids, decoded=4):
    """{position: (V,) float32 NumPy}: from a prefill of all, of a half in two chunks, and one by one for the last `decoded`."""
    found, size = {}, len(ids)
    decoded = min(decoded, size // 2)

    def feed(cache, start, end):
        found.setdefault(end - 1, []).append(
            np.array(
                llm_inference.forward(ids[start:end], weights, config, cache, start).astype(
                    mx.float32
                )
            )
        )

    whole, parts = (llm_inference.make_cache(weights, config, size) for _ in range(2))
    feed(whole, 0, size)
    feed(parts, 0, size // 3), feed(parts, size // 3, size - decoded)
    for position in range(size - decoded, size):
        feed(parts, position, position + 1)
    return found


def errors(found, expected):
    """Found logits {position: [(V,), ...]} less the expected ones (L, V), over the largest of these: (comparisons, V)."""
    return (
        np.stack([logits - expected[position] for position in found for logits in found[position]])
        / np.abs(expected).max()
    )


def random_ids(count, vocab_size, seed=0):
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


@pytest.fixture(scope="session")
def full(tmp_path_factory):
    """A 28-layer checkpoint of the 0.6B's shape with random bfloat16 weights, 1.2 GB; removed at the end."""
    folder = tmp_path_factory.mktemp("full")
    yield checkpoints.write_checkpoint(
        folder,
        checkpoints.make_config(**checkpoints.FULL_SIZE, torch_dtype="bfloat16"),
        dtype=mx.bfloat16,
    )
    (folder / "model.safetensors").unlink()


# ---- Logits


@pytest.mark.parametrize("layout", ["rope_theta", "rope_parameters"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "head_dim", [8, 16, 32], ids=lambda d: f"head_dim{d}"
)  # hidden / heads is 16
@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids=lambda k: f"kv{k}")
def test_float32_logits_of_a_random_model(tmp_path, kv_heads, head_dim, tied, layout):
    theta = 10 ** np.random.default_rng(kv_heads * head_dim).integers(3, 7).item()
    rope = (
        {"rope_theta": theta}
        if layout == "rope_theta"
        else {
            "rope_theta": None,
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        }
    )
    config = checkpoints.make_config(
        num_key_value_heads=kv_heads, head_dim=head_dim, tie_word_embeddings=tied, **rope
    )
    folder = checkpoints.write_checkpoint(tmp_path, config, seed=kv_heads + head_dim)
    weights, config, _ = llm_inference.load(folder)
    ids = random_ids(70, config["vocab_size"], seed=head_dim)
    assert (
        np.abs(
            errors(our_logits(weights, config, ids), reference_logits(reference(folder), ids))
        ).max()
        <= FLOAT32_LIMIT
    )


@pytest.mark.parametrize("length", [5, 64, 1030])
def test_float32_logits_of_the_miniature(length):
    weights, config, _ = llm_inference.load(MINI, mx.float32)
    ids = random_ids(length, config["vocab_size"], seed=length)
    assert (
        np.abs(
            errors(our_logits(weights, config, ids, 3), reference_logits(reference(MINI), ids))
        ).max()
        <= FLOAT32_LIMIT
    )


def test_float32_logits_of_a_full_size_model(full):
    ids = random_ids(64, 151936)
    expected = reference_logits(reference(full), ids)
    weights, config, _ = llm_inference.load(full, mx.float32)
    assert np.abs(errors(our_logits(weights, config, ids), expected)).max() <= FLOAT32_LIMIT


def bfloat16_ratios(folder, prompts, decoded=4):
    """(rms, largest) error of our bfloat16 logits over transformers' own at the same positions, both against its float32."""
    model = reference(folder)
    exact = [reference_logits(model, ids) for ids in prompts]
    model = reference(folder, torch.bfloat16)
    rough = [reference_logits(model, ids) for ids in prompts]
    weights, config, _ = llm_inference.load(folder, mx.bfloat16)
    ours, theirs = [], []
    for ids, good, other in zip(prompts, exact, rough):
        found = our_logits(weights, config, ids, decoded)
        ours.append(errors(found, good))
        theirs.append(
            errors(
                {position: len(all_of) * [other[position]] for position, all_of in found.items()},
                good,
            )
        )
    rms = lambda parts: np.sqrt(np.mean([np.mean(part**2) for part in parts]))
    largest = lambda parts: np.mean(
        [np.abs(part).max(axis=-1).mean() for part in parts]
    )  # the worst logit of a position
    print(
        f"bfloat16 error, ours: rms {rms(ours):.2e}, worst {largest(ours):.2e}; transformers: {rms(theirs):.2e}, {largest(theirs):.2e}"
    )
    return rms(ours) / rms(theirs), largest(ours) / largest(theirs)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_bfloat16_error_of_random_models(tmp_path, kv_heads):
    found = []
    for seed in range(4):
        config = checkpoints.make_config(num_key_value_heads=kv_heads, torch_dtype="bfloat16")
        folder = checkpoints.write_checkpoint(
            tmp_path / str(seed), config, dtype=mx.bfloat16, seed=seed
        )
        found.append(
            bfloat16_ratios(
                folder, [random_ids(48, 2048, seed=10 * seed + i) for i in range(4)], decoded=24
            )
        )
    assert np.mean(found, axis=0).max() <= BFLOAT16_FACTOR, found


def test_bfloat16_error_of_the_miniature():
    tokenizer = llm_inference.load(MINI)[2]
    prompts = [tokenizer.encode(text * 3).ids for text in prompt_texts()[::6]]
    assert max(bfloat16_ratios(MINI, prompts)) <= BFLOAT16_FACTOR


def test_bfloat16_error_of_a_full_size_model(full):
    assert (
        max(bfloat16_ratios(full, [random_ids(16, 151936, seed=seed) for seed in range(2)]))
        <= BFLOAT16_FACTOR
    )


# ---- Greedy tokens of the miniature


def prompt_texts():
    """A few hundred prompts, English and Chinese, from the table of facts."""
    lines = [
        line.split("\t")
        for line in (ROOT / "tests" / "Qwen3-mini" / "facts.tsv").read_text("utf-8").splitlines()
        if line[:1] not in ("#", "")
    ]
    rows, texts = [dict(zip(lines[0], line)) for line in lines[1:]], []
    for row in rows[::4]:
        a, b = row["country"], row["country_zh"]
        texts += [
            f"The capital of {a} is",
            f"The currency of {a} is",
            f"The main language of {a} is",
            f"{b}的首都是",
            f"{b}的货币是",
            f"<|im_start|>user\nWhat is the capital of {a}?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ]
    return texts


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def greedy(request):
    """(type, [(prompt ids, our greedy ids of at most 24)], stop ids): an answer of fewer ids ended with a stop id."""
    weights, config, tokenizer = llm_inference.load(MINI, getattr(mx, request.param))
    prompts, stop = [tokenizer.encode(text).ids for text in prompt_texts()], config["eos_token_id"]
    return (
        request.param,
        [(ids, list(llm_inference.generate(ids, weights, config, stop, 24))) for ids in prompts],
        stop,
    )


def assert_same_choices(greedy, logits_of):
    """At each step, given the same past, the other engine's best token is ours, so its greedy text is ours; in bfloat16 its
    best may beat ours by what bfloat16 can blur."""
    dtype, pairs, stop = greedy
    blur, differ = 0 if dtype == "float32" else BLUR, []
    for ids, answer in pairs:
        logits = logits_of(ids + answer)[len(ids) - 1 :]
        chosen = [[token] for token in answer] + ([stop] if len(answer) < 24 else [])
        for step, allowed in enumerate(chosen):
            row = logits[step]
            lead = row.max() - row[allowed].max()
            if lead > blur * np.abs(row).max():
                differ.append((ids, step, allowed, int(row.argmax()), float(lead)))
    assert len(pairs) > 250 and not differ, (
        f"{len(differ)} of {sum(len(answer) for _, answer in pairs)} choices differ: {differ[:3]}"
    )


def test_greedy_tokens_are_those_of_transformers(greedy):
    model = reference(MINI, getattr(torch, greedy[0]))
    assert_same_choices(greedy, lambda ids: reference_logits(model, ids))


def test_greedy_tokens_are_those_of_mlx_lm(greedy):
    from mlx_lm.utils import load_model

    model = load_model(MINI)[0]
    model.set_dtype(getattr(mx, greedy[0]))
    assert_same_choices(greedy, lambda ids: np.array(model(mx.array([ids]))[0].astype(mx.float32)))


# ---- Sampling filters


def kept(logits, **filters):
    """The set of ids that a draw could give."""
    return set(
        np.flatnonzero(
            np.isfinite(np.array(llm_inference.filter_logits(mx.array(logits), **filters)))
        ).tolist()
    )


@pytest.mark.parametrize("vocab_size", [50, 2000, 151936])
@pytest.mark.parametrize(
    "top_k, top_p",
    [
        (1, 1.0),
        (20, 1.0),
        (0, 0.0),
        (0, 0.1),
        (0, 0.8),
        (0, 0.95),
        (20, 0.8),
        (5, 0.5),
        (10**6, 0.9),
    ],
)
def test_filters_keep_what_those_of_transformers_keep(vocab_size, top_k, top_p):
    tolerance = (
        1e-5 if vocab_size < 10**4 else 5e-4
    )  # of tens of thousands of almost equal probabilities, summed in float32
    for seed in range(5):
        rng = np.random.default_rng(seed)
        logits = (rng.permutation(vocab_size) / vocab_size * 6 * (seed + 1)).astype(
            np.float32
        )  # no two alike
        scores = torch.tensor(logits, dtype=torch.float64)[None]
        if top_k:
            scores = TopKLogitsWarper(top_k)(None, scores)
        whole = scores.softmax(-1)[0].numpy()
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(None, scores)
        theirs, ours = (
            set(np.flatnonzero(np.isfinite(scores[0].numpy())).tolist()),
            kept(logits, top_k=top_k, top_p=top_p),
        )
        for token in (
            ours ^ theirs
        ):  # only where the likelier ones add up to top_p but for float32's rounding
            assert abs(whole[whole > whole[token]].sum() - top_p) < tolerance, (
                seed,
                token,
                len(ours),
                len(theirs),
            )


# ---- What transformers says, written down for tests/test_expected.py

TEXTS = [
    "The capital of France is",
    "The capital of Japan is",
    "The capital of Germany is",
    "The currency of India is",
    "The main language of Brazil is",
    "Tokyo is the capital of",
    "Kenya is in",
    "法国的首都是",
    "日本的首都是",
    "日本的货币是",
    "德国的首都是",
    "埃及的首都是",
]
QUESTIONS = [
    "What is the capital of Japan?",
    "What is the capital of Canada?",
    "日本的首都是哪里？",
    "What currency is used in France?",
]


def transformers_greedy(model, ids, count, stop):
    """-> ids and, for each, the lead of the best logit over the second; a stop id ends both and is not in them."""
    answer, margins = [], []
    while len(answer) < count:
        logits = reference_logits(model, ids + answer)[-1]
        second, best = np.argsort(logits)[-2:].tolist()
        margins.append(round(float(logits[best] - logits[second]), 3))
        if best in stop:
            break
        answer.append(best)
    return answer, margins


def write():
    model, tokenizer, stop = (
        reference(MINI),
        AutoTokenizer.from_pretrained(MINI),
        set(llm_inference.load(MINI)[1]["eos_token_id"]),
    )
    prompts = [(text, 100 if text == TEXTS[0] else 24) for text in TEXTS]
    prompts += [
        (
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=think,
            ),
            24,
        )
        for text in QUESTIONS
        for think in (False, True)
    ]
    cases = []
    for text, count in prompts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer, margins = transformers_greedy(model, ids, count, stop)
        cases.append(
            {
                "prompt": text,
                "ids": ids,
                "max_tokens": count,
                "answer": answer,
                "text": tokenizer.decode(answer),
                "smallest_margin": min(margins),
                "margins": margins,
            }
        )
    sha = hashlib.sha256((MINI / "model.safetensors").read_bytes()).hexdigest()
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    EXPECTED.write_text(
        f'{{"made_by": "python tests/reference.py --write",\n"sha256": "{sha}",\n"cases": [\n{lines}\n]}}\n',
        "utf-8",
    )
    print(
        f"{EXPECTED}: {len(cases)} prompts, smallest margin {min(case['smallest_margin'] for case in cases)}"
    )


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
