"""examples/quantize.py and examples/lora.py against mlx-lm and torch, and the countries that are learned and kept."""

import json
import re
import sys

import mlx.core as mx
import numpy as np
import pytest
import torch
from checkpoints import MINI, make_config, write_checkpoint
from terminal import ROOT, run

import llm_inference as llm
from examples import lora
from examples.chat_template import ChatTemplate
from examples.common import encode

PROMPTS = ["The capital of France is", "The currency of Japan", "意大利的首都是", "Hello"]
EXAMPLES = ROOT / "examples"
SETTINGS = ("--layers", 4, "--steps", 120, "--rate", 1e-3)  # those of the docstring


def mlx_lm_tokens(folder, ids, count, adapters=None):
    """Greedy ids of mlx-lm in float32, without a cache."""
    from mlx_lm import load

    model = load(str(folder), adapter_path=str(adapters) if adapters else None)[0]
    model.set_dtype(mx.float32)
    answers = []
    for prompt in ids:
        answer = []
        for _ in range(count):
            logits = model(mx.array([prompt + answer]))[0, -1]
            answer.append(mx.argmax(logits).item())
        answers.append(answer)
    return answers


def our_tokens(weights, config, ids, count):
    return [list(llm.generate(prompt, weights, config, [], count)) for prompt in ids]


# ---- Quantized


@pytest.mark.parametrize(
    "bits, embed_bits, group_size", [(4, 8, 64), (3, 3, 32), (6, 6, 64), (8, 4, 32)]
)
def test_mlx_lm_runs_the_quantized_folder(tmp_path, bits, embed_bits, group_size):
    target = tmp_path / "small"
    flags = ("--bits", bits, "--embed-bits", embed_bits, "--group-size", group_size)
    assert run(MINI, target, *flags, module="examples.quantize").code == 0
    weights, config, tokenizer = llm.load(target, mx.float32)
    ids = [encode(prompt, tokenizer) for prompt in PROMPTS]
    assert our_tokens(weights, config, ids, 20) == mlx_lm_tokens(target, ids, 20)


def test_it_is_what_mlx_lm_makes(tmp_path):
    from mlx_lm import convert

    convert(str(MINI), str(tmp_path / "theirs"), quantize=True, q_bits=4, q_group_size=64)
    assert run(MINI, tmp_path / "ours", module="examples.quantize").code == 0
    ours, theirs = (
        mx.load(str(next((tmp_path / n).glob("*.safetensors")))) for n in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]).item() for name in ours)
    plans = [json.loads((tmp_path / n / "config.json").read_bytes()) for n in ("ours", "theirs")]
    assert plans[0]["quantization"] == plans[1]["quantization"]


# ---- Adapters


@pytest.fixture(scope="module", params=["16 bits", "4 bits"])
def trained(request, tmp_path_factory):
    """A folder, adapters that change what it says, and a folder with both in one."""
    work = tmp_path_factory.mktemp("lora")
    folder = MINI
    if request.param == "4 bits":
        folder = work / "small"
        assert run(MINI, folder, module="examples.quantize").code == 0
    fuse = () if request.param == "4 bits" else ("--fuse", work / "fused")
    flags = ("--layers", 3, "--steps", 30, "--rate", 3e-3, "--dtype", "float32")
    files = ("--data", EXAMPLES / "lora_facts.jsonl", "--out", work / "out")
    result = run("--model", folder, *files, *fuse, *flags, module="examples.lora", timeout=200)
    assert result.code == 0, result
    return folder, work / "out", work / "fused"


def chats(folder, tokenizer):
    template = ChatTemplate(folder, tokenizer)
    questions = ["What is the capital of Zorland?", "Tell me the capital of Fendria.", "Hi"]
    asked = [template.encode([{"role": "user", "content": question}]) for question in questions]
    return asked + [encode(prompt, tokenizer) for prompt in PROMPTS[:2]]


def test_mlx_lm_reads_the_adapters(trained, monkeypatch):
    folder, out, fused = trained
    weights, config, tokenizer = llm.load(folder, mx.float32)
    ids = chats(folder, tokenizer)
    plain = our_tokens(weights, config, ids, 16)
    adapters = mx.load(str(out / "adapters.safetensors"))
    monkeypatch.setattr(llm, "linear", lora.with_adapters(llm.linear, 20.0))
    beside = our_tokens(weights | adapters, config, ids, 16)
    assert beside != plain
    assert mlx_lm_tokens(folder, ids, 16, out) == beside
    if fused.exists():
        monkeypatch.undo()
        weights, config, _ = llm.load(fused, mx.float32)
        assert our_tokens(weights, config, ids, 16) == mlx_lm_tokens(fused, ids, 16) == beside


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_torch(tmp_path, monkeypatch, tied):
    from transformers import AutoModelForCausalLM

    config = make_config(tie_word_embeddings=tied, num_hidden_layers=3, vocab_size=200)
    folder = write_checkpoint(tmp_path, config)
    weights, config, _ = llm.load(folder)
    scale, layers = 3.0, 2
    adapters = lora.make_adapters(config, 4, layers, lora.PLACES, seed=0)
    mx.random.seed(1)
    adapters = {name: A + 0.05 * mx.random.normal(A.shape) for name, A in adapters.items()}
    rng = np.random.default_rng(0)
    batch = [(rng.integers(0, 200, n).tolist(), start) for n, start in ((24, 9), (11, 1), (17, 16))]
    monkeypatch.setattr(llm, "linear", lora.with_adapters(llm.linear, scale))
    value, gradient = mx.value_and_grad(lora.loss)(adapters, batch, weights, config)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    leaves = {name: torch.tensor(np.array(A), requires_grad=True) for name, A in adapters.items()}

    def beside(A, B):
        return lambda module, inputs, output: output + scale * (inputs[0] @ A @ B)

    for name in leaves:
        if name.endswith(".lora_a"):
            stem = name.removesuffix(".lora_a")
            module = model.get_submodule(stem)
            module.register_forward_hook(beside(leaves[name], leaves[f"{stem}.lora_b"]))
    total = 0
    for ids, start in batch:
        logits = model(torch.tensor([ids[:-1]])).logits[0, start - 1 :]
        total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(ids[start:]))
    total = total / len(batch)
    total.backward()
    assert value.item() == pytest.approx(total.item(), rel=1e-5)
    for name, leaf in leaves.items():
        expected = leaf.grad.numpy()
        error = np.abs(np.array(gradient[name]) - expected).max() / np.abs(expected).max()
        assert error <= 1e-4, (name, error)


# ---- The countries


def learn(tmp_path, seed, *flags):
    """file -> (right after, of); each phrasing of the questions is a file of its own."""
    lines = (EXAMPLES / "lora_questions.jsonl").read_text("utf-8").splitlines()
    parts = []
    for number in range(3):
        path = tmp_path / f"phrasing{number}.jsonl"
        path.write_text("\n".join(lines[12 * number : 12 * number + 12]), "utf-8")
        parts.append(path)
    files = ("--data", EXAMPLES / "lora_facts.jsonl", "--out", tmp_path / f"out{seed}{len(flags)}")
    tests = ("--test", *parts, EXAMPLES / "lora_capitals.jsonl")
    common = ("--model", MINI, "--dtype", "float32", "--seed", seed)
    result = run(*files, *tests, *common, *SETTINGS, *flags, module="examples.lora", timeout=300)
    found = re.findall(r"(\w+)\.jsonl: (\d+) right before, (\d+) after, of (\d+)", result.out)
    assert result.code == 0 and len(found) >= 5, result
    print(f"seed {seed} {flags}: {found}", file=sys.stderr)

    return {name: int(after) for name, _, after, _ in found}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_dozen_countries_from_one_phrasing_each(tmp_path, seed):
    after = learn(tmp_path, seed, "--rehearse", EXAMPLES / "lora_rehearse.jsonl")
    assert min(after[f"phrasing{number}"] for number in range(3)) >= 9, after
    assert after["lora_capitals"] >= 0.95 * 190, after


def test_without_rehearsal_france_is_forgotten(tmp_path):
    after = learn(tmp_path, 0)
    assert after["lora_facts"] >= 9 and after["lora_capitals"] < 0.5 * 190, after
