"""examples/long_context.py: frequencies, the factor, what runs and what is refused."""

import json
import math

import mlx.core as mx
import pytest
from checkpoints import MINI, make_config, write_checkpoint
from terminal import START, assert_one_complaint, mini, run

import llm_inference as llm
from examples import long_context
from examples.common import encode

MODULE = "examples.long_context"
CONFIG = {"head_dim": 32, "rope_theta": 1e6, "max_position_embeddings": 2048}


def stretched(**changes):
    method = changes.pop("method", None)
    return long_context.stretch(CONFIG | changes, method, changes.pop("factor", None))


def largest_difference(one, other):
    return mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max().item()


def test_linear_reaches_position_4p_at_the_angle_of_p():
    x = mx.random.normal((3, 1, 32))
    rope = long_context.rope(stretched(method="linear"))
    for position in (0, 1, 17, 500):
        found = rope(x, 4 * position, None)
        expected = llm.apply_rope(x, position, CONFIG["rope_theta"])
        assert largest_difference(found, expected) < 1e-4, position


@pytest.mark.parametrize("method", ["linear", "yarn"])
def test_factor_1_changes_nothing(method):
    x = mx.random.normal((3, 40, 32))
    rope = long_context.rope(stretched(method=method, factor=1))
    assert largest_difference(rope(x, 5, None), llm.apply_rope(x, 5, 1e6)) < 1e-4


def test_yarn_turns_each_pair_as_the_paper_says():
    """In float64, pair by pair: a ramp between 32 turns and 1 turn within 2,048 positions."""
    low = math.floor(32 * math.log(2048 / (2 * math.pi * 32)) / (2 * math.log(1e6)))
    high = math.ceil(32 * math.log(2048 / (2 * math.pi)) / (2 * math.log(1e6)))
    assert (low, high) == (2, 7)
    sharper = 0.1 * math.log(4) + 1
    config = stretched()
    assert (config["rope_type"], config["factor"]) == ("yarn", 4)
    assert long_context.attention_factor(config) == pytest.approx(1.1386294)
    frequencies = long_context.stretched_frequencies(config).tolist()
    position = 100
    x = mx.random.normal((1, 1, 32))
    turned = long_context.rope(config)(x, position, None)[0, 0].tolist()
    first, second = x[0, 0, :16].tolist(), x[0, 0, 16:].tolist()
    for j in range(16):
        usual = 1e6 ** (-2 * j / 32)
        share = min(max((j - low) / (high - low), 0), 1)
        expected = usual * (1 - share) + usual / 4 * share
        assert frequencies[j] == pytest.approx(expected, rel=1e-6), j
        cos = sharper * math.cos(position * expected)
        sin = sharper * math.sin(position * expected)
        assert turned[j] == pytest.approx(first[j] * cos - second[j] * sin, abs=1e-4), j
        assert turned[j + 16] == pytest.approx(second[j] * cos + first[j] * sin, abs=1e-4), j


def test_what_a_config_says_of_yarn_counts():
    usual = stretched()
    assert long_context.attention_factor(stretched(attention_factor=0.5)) == 0.5
    both = stretched(mscale=2, mscale_all_dim=1)
    expected = (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)
    assert long_context.attention_factor(both) == pytest.approx(expected)
    for changes in ({"beta_fast": 8}, {"beta_slow": 4}, {"truncate": False}):
        found = long_context.stretched_frequencies(stretched(**changes))
        assert largest_difference(found, long_context.stretched_frequencies(usual)) > 1e-5, changes


@pytest.mark.parametrize(
    ("changes", "original", "limit", "factor"),
    [
        ({}, 2048, 8192, 4),
        ({"factor": 2.5}, 2048, 5120, 2.5),
        ({"original_max_position_embeddings": 1024, "factor": 4}, 1024, 4096, 4),
        ({"original_max_position_embeddings": 256, "factor": 4}, 256, 2048, 4),
        ({"original_max_position_embeddings": 256}, 256, 2048, 8),
    ],
)
def test_lengths(changes, original, limit, factor):
    config = stretched(rope_type="yarn", **changes)
    assert config["original_max_position_embeddings"] == original
    assert config["max_position_embeddings"] == limit
    assert config["factor"] == factor


def test_rows_of_a_batch_and_types():
    rope = long_context.rope(stretched())
    x = mx.random.normal((3, 2, 1, 32))
    batch = rope(x, mx.array([7, 0, 3000]), None)
    for row, offset in enumerate((7, 0, 3000)):
        assert largest_difference(batch[row], rope(x[row], offset, None)) < 1e-5
    assert rope(x.astype(mx.bfloat16), 3, None).dtype == mx.bfloat16


def write_mini(folder, **changes):
    """The miniature with another config."""
    config = json.loads((MINI / "config.json").read_bytes()) | changes
    return write_checkpoint(folder, config, mx.load(str(MINI / "model.safetensors")))


def test_runs_beyond_the_length_of_training(tmp_path):
    folder = write_mini(tmp_path / "short", max_position_embeddings=64)
    prompt = " ".join([START] * 20)
    count = len(encode(prompt, llm.load(MINI, lazy=True)[2]))
    assert count > 64
    assert_one_complaint(run("--model", folder, prompt))
    result = run("--model", folder, "--max-tokens", 8, prompt, module=MODULE)
    assert result.code == 0, result
    lines = result.out.splitlines()
    assert lines[0] == "yarn: 64 positions become 256"
    assert lines[1] == "cos and sin are multiplied by 1.1386"
    slower = [line.split()[-1] for line in lines[3:19]]
    assert slower[0] == "1.00" and slower[3:] == ["4.00"] * 13, slower
    assert lines[19] == f"{count} tokens are read, then:"
    assert lines[20]
    linear = mini("--max-tokens", 4, "--method", "linear", "--factor", 2, module=MODULE)
    assert linear.out.startswith("linear: 2048 positions become 4096"), linear
    assert [line.split()[-1] for line in linear.out.splitlines()[3:19]] == ["2.00"] * 16


def test_the_model_is_run_with_the_frequencies_of_the_table(monkeypatch):
    weights, config, tokenizer = llm.load(MINI, dtype=mx.float32)
    ids = encode(START, tokenizer)

    def answer():
        tokens = llm.generate(ids, weights, config, config["eos_token_id"], max_tokens=12)
        return tokenizer.decode(list(tokens))

    usual = answer()
    stretched_config = long_context.stretch(config, "linear", 8.0)
    monkeypatch.setattr(llm, "apply_rope", long_context.rope(stretched_config))
    expected = answer()
    assert expected != usual  # all pairs 8 times slower are too much for the miniature
    flags = ["--method", "linear", "--factor", 8, "--dtype", "float32", "--max-tokens", 12]
    result = mini(*flags, START, module=MODULE)
    assert result.out.endswith(f"tokens are read, then:\n{expected}\n"), result


def test_a_config_that_asks_for_it(tmp_path):
    scaling = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}
    folder = write_mini(tmp_path / "yarn", rope_scaling=scaling)
    assert_one_complaint(run("--model", folder))  # the file itself runs no stretched RoPE
    result = run("--model", folder, module=MODULE)
    assert result.code == 0, result
    assert result.out.startswith("yarn: 1024 positions become 2048"), result
    assert " Paris." in result.out
    replaced = run("--model", folder, "--factor", 4, "--max-tokens", 1, module=MODULE)
    assert replaced.out.startswith("yarn: 1024 positions become 4096"), replaced


def test_complaints(tmp_path):
    llama3 = {"rope_type": "llama3", "factor": 8.0}
    odd = write_checkpoint(tmp_path / "llama3", make_config(rope_scaling=llama3))
    complaint = assert_one_complaint(run("--model", odd, module=MODULE))
    assert "llama3" in complaint and "--method" in complaint
    assert run("--model", odd, "--method", "yarn", "--max-tokens", 1, module=MODULE).code == 0
    many = write_checkpoint(tmp_path / "many", make_config(rope_scaling=llama3 | {"factor": "x"}))
    assert "'x'" in assert_one_complaint(run("--model", many, "--method", "yarn", module=MODULE))
    usage = mini("--factor", "0.5", module=MODULE)
    assert usage.code == 2 and "0.5" in usage.err and "Traceback" not in usage.err
    assert mini("--method", "ntk", module=MODULE).code == 2
