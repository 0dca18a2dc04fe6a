"""examples/explain.py: the model's real numbers, in 80 columns."""

import json
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import MINI
from terminal import (
    FRANCE,
    POOL,
    START,
    assert_one_complaint,
    columns,
    copy_random_model,  # noqa: F401
    make_random_model,  # noqa: F401
    mini,
    run,
)
from tokenizers import Tokenizer

import llm_inference

MODULE = "examples.explain"
KNOWN = Tokenizer.from_file(str(MINI / "tokenizer.json"))
SHADES = " .:-=+*#@"


def explain(*args, **options):
    return mini(*args, module=MODULE, **options)


def probabilities(ids, weights, config, layers):
    """The next token's probabilities after the first `layers` layers."""
    config = config | {"num_hidden_layers": layers}
    cache = llm_inference.make_cache(weights, config, len(ids))
    logits = llm_inference.forward(ids, weights, config, cache, 0)
    return np.array(mx.softmax(logits.astype(mx.float32)))


@pytest.mark.parametrize("prompt", [START, "The capital of", "日本的首都是"])
def test_it_tells_the_models_real_numbers(prompt):
    """Tokens with ids, a line per layer, counted from 0, the five likeliest with percentages and
    bars, the cache's bytes, then the answer."""
    weights, config, tokenizer = llm_inference.load(MINI)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    result = explain(prompt, "--max-tokens", 3)
    assert result.code == 0, result
    plain = mini(prompt, "--max-tokens", 3)
    assert result.out.endswith(plain.out), result
    lines = result.out.removesuffix(plain.out).splitlines()
    percent = re.compile(r"(\d+(?:\.\d+)?) ?%")
    chances = [line for line in lines if percent.search(line)]
    layers, five = chances[:-5], chances[-5:]

    at = lines.index(chances[0])
    for position, token in enumerate(ids):
        wanted = rf"^ *{position}\b.*\b{token}\b"
        text = tokenizer.decode([token]).strip()
        assert any(re.search(wanted, line) and text in line for line in lines[:at]), token

    N = config["num_hidden_layers"]
    assert [int(re.search(r"\d+", line)[0]) for line in layers] == list(range(N)), layers
    for layer, line in enumerate(layers):
        wanted = probabilities(ids, weights, config, layer + 1)
        assert abs(float(percent.search(line)[1]) - 100 * wanted.max()) < 0.6, line
        assert tokenizer.decode([int(wanted.argmax())]).strip() in line, line

    shown = [float(percent.search(line)[1]) for line in five]
    wanted = probabilities(ids, weights, config, N)
    best = np.argsort(-wanted)[:5]
    assert shown == sorted(shown, reverse=True) and sum(shown) <= 100.3 and shown[0] > 0
    assert np.allclose(shown, 100 * wanted[best], atol=0.6), (shown, wanted[best])
    assert tokenizer.decode([int(best[0])]).strip() in five[0]
    bars = [len((re.search(r"#+", line) or [""])[0]) for line in five]
    assert bars[0] > 0 and bars == sorted(bars, reverse=True), five

    numbers = 2 * N * config["num_key_value_heads"] * config["head_dim"]
    size = numbers * weights["model.norm.weight"].itemsize
    text = "\n".join(lines[at:]).replace(",", "")
    assert re.search(rf"\b{size}\b", text) and re.search(rf"\b{size * len(ids)}\b", text), lines


# ---- The attention map


def spelled_out_weights(ids, weights, config, layer, head):
    """softmax(q k^T / sqrt(d)) of one head, in NumPy, from the rows that reach the layer."""
    cache = llm_inference.make_cache(weights, config, len(ids))
    x = llm_inference.embed(ids, weights, config)
    for before in range(layer):
        x = llm_inference.transformer_block(x, weights, config, before, cache, 0)
    norm = weights[f"model.layers.{layer}.input_layernorm.weight"]
    x = llm_inference.rms_norm(x, norm, config["rms_norm_eps"])
    q, k, _ = llm_inference.queries_keys_values(x, weights, config, layer, 0)
    shared = config["num_attention_heads"] // config["num_key_value_heads"]
    scores = np.array(q[head].astype(mx.float32)) @ np.array(k[head // shared].astype(mx.float32)).T
    scores = scores / np.sqrt(config["head_dim"])
    scores[np.triu_indices(len(ids), 1)] = -np.inf
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def map_of(result, count):
    """The map's rows, each cell as a number from 0 to 1."""
    lines = result.out.splitlines()
    top = next(number for number, line in enumerate(lines) if line.startswith("Attention"))
    rows = []
    for number, line in enumerate(lines[top + 2 : top + 2 + count]):
        cells = line[26 - (columns(line) - len(line)) :].ljust(number + 1)
        assert re.match(rf" *{number} ", line) and len(cells) == number + 1, line
        rows.append([SHADES.index(cell) / (len(SHADES) - 1) for cell in cells])
    return lines[top], rows


@pytest.mark.parametrize("layer, head", [(0, 0), (3, 0), (3, 2), (5, 3)])
def test_the_map_shows_the_weights_of_that_head(layer, head):
    """A row's shades are the head's weights, one cell for each token so far: none after it."""
    prompt = "The capital of France is Paris. The capital of Japan is"
    weights, config, tokenizer = llm_inference.load(MINI, mx.float32)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    wanted = spelled_out_weights(ids, weights, config, layer, head)
    args = ["--layer", layer, "--head", head, "--dtype", "float32", "--max-tokens", 1]
    title, rows = map_of(explain(prompt, *args), len(ids))
    assert f"layer {layer}, head {head}" in title
    for position, row in enumerate(rows):
        assert np.allclose(row, wanted[position, : position + 1], atol=0.51 / (len(SHADES) - 1))


def test_a_layer_or_head_that_is_not_there_is_wrong_usage():
    """Layers and heads count from 0: the number of layers is one too many. Exit 2, one line."""
    layers = llm_inference.load(MINI, lazy=True)[1]["num_hidden_layers"]
    rows = [["--layer", layers], ["--head", 4], ["--layer", -1], ["--layer", "x"], [""]]
    for result in POOL.map(lambda args: explain(*args), rows):
        assert_one_complaint(result, code=2)
        assert result.out == "", result


# ---- Width

vocabulary = KNOWN.get_vocab(with_added_tokens=False)
LONGEST = KNOWN.decode([max(vocabulary.values(), key=lambda token: len(KNOWN.decode([token])))])
STRANGE = "🦜🏳️‍🌈" + "\n" * 40 + " " * 200 + "مرحبا" + "=" * 100
WIDE = {
    "300 tokens": "The capital of France is Paris. " * 43,
    "Chinese": "法国的首都是巴黎。意大利的首都是罗马。日本的首都是" * 3,
    "longest token": LONGEST * 3 + STRANGE,
}


@pytest.mark.parametrize("name", WIDE)
def test_it_fits_80_columns(name, random_model):
    """Whatever the prompt and the likeliest tokens, no line is wider than 80 columns."""
    prompt = WIDE[name]
    assert name != "300 tokens" or len(KNOWN.encode(prompt).ids) >= 300
    for folder in MINI, random_model:
        result = run("--model", folder, prompt, "--max-tokens", 2, "--layer", 1, module=MODULE)
        assert result.code == 0 and prompt in result.out, result
        lines = result.out[: result.out.rindex(prompt)].splitlines()
        wide = [line for line in lines if columns(line) > 80]
        assert not wide, wide[:3]


def test_it_fits_80_columns_with_tokens_that_are_wider(endless):
    """Vocabularies hold tokens of more than 80 characters (runs of spaces, rulers): their lines
    fit all the same."""
    folder = endless()
    data = json.loads((folder / "tokenizer.json").read_bytes())
    long = "=" * 120, "龘" * 45, " " * 100 + "x"
    plain = dict.fromkeys(["special", "normalized", "lstrip", "rstrip", "single_word"], False)
    free = 1 + max(token["id"] for token in data["added_tokens"])
    for number, text in enumerate(long):
        data["added_tokens"].append(plain | {"id": free + number, "content": text})
    (folder / "tokenizer.json").write_text(json.dumps(data))
    # The tokens are beyond the table's rows: it gets rows for them.
    weights = dict(mx.load(str(folder / "model.safetensors")))
    rows = weights["model.embed_tokens.weight"]
    config = json.loads((folder / "config.json").read_bytes())
    if free + len(long) > config["vocab_size"]:
        weights["model.embed_tokens.weight"] = mx.concatenate([rows, rows[: len(long)]])
        mx.eval(weights)
        Path(folder / "model.safetensors").unlink()
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        endless(vocab_size=config["vocab_size"] + len(long))
    prompt = "a".join(long)
    result = run("--model", folder, prompt, "--max-tokens", 1, module=MODULE)
    shown = result.out[: result.out.rfind(prompt)].splitlines()
    assert result.code == 0, result
    for number in range(3):
        assert any(str(free + number) in line for line in shown), result
    wide = [line for line in shown if columns(line) > 80]
    assert not wide, wide


# ---- A chat, a full disk


def test_a_chat_is_shown_as_the_model_gets_it():
    """--chat shows the ids of the whole dialogue, control marks too, before the answer."""
    text = f"<|im_start|>user\n{FRANCE}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    result = explain("--chat", FRANCE)
    assert result.code == 0 and result.out.rstrip().splitlines()[-1].count("Paris"), result
    lines = result.out.splitlines()
    ids = [int(re.search(r"id +(\d+)", line)[1]) for line in lines if re.search(r"id +\d+", line)]
    assert ids == KNOWN.encode(text, add_special_tokens=False).ids
    assert "<|im_start|>" in result.out, result.out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line():
    """A stdout that takes nothing: exit 1, one line."""
    with open("/dev/full", "wb") as full:
        assert_one_complaint(explain("--max-tokens", 5, stdout=full))


def test_help_is_a_page_with_an_example():
    result = run("--help", module=MODULE)
    assert result.code == 0 and "examples.explain" in result.out, result
    for flag in "--layer", "--head", "--chat", "--model":
        assert flag in result.out
    assert max(map(len, result.out.splitlines())) <= 80
