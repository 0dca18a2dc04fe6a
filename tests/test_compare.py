"""examples/compare.py without transformers: the file is compared with itself, mistakes planted.

tests/reference_ports.py does the same against transformers.
"""

import importlib.util
import math
import sys

import mlx.core as mx
import pytest
from checkpoints import MINI, make_config, write_checkpoint
from terminal import run

import llm_inference as llm
from examples import compare

IDS = [5, 17, 3, 99, 1000, 64, 2, 800]


# ---- Mistakes of a port: each changes the file's functions, its weights or its config.


def interleaved_pairs(monkeypatch, weights, config):
    def apply_rope(x, offset, theta):
        return mx.fast.rope(x, x.shape[-1], traditional=True, base=theta, scale=1.0, offset=offset)

    monkeypatch.setattr(llm, "apply_rope", apply_rope)


def no_qk_norm(monkeypatch, weights, config):
    rms_norm = llm.rms_norm
    monkeypatch.setattr(
        llm, "rms_norm", lambda x, weight, eps: x if x.ndim == 3 else rms_norm(x, weight, eps)
    )


def no_call_of_qk_norm(monkeypatch, weights, config):
    def queries_keys_values(x, weights, config, layer, offset):
        name = f"model.layers.{layer}.self_attn"
        heads = (len(x), -1, config["head_dim"])
        rows = [llm.linear(x, weights, f"{name}.{part}_proj") for part in "qkv"]
        q, k, v = (part.reshape(heads).swapaxes(0, 1) for part in rows)
        theta = config["rope_theta"]
        return llm.apply_rope(q, offset, theta), llm.apply_rope(k, offset, theta), v

    monkeypatch.setattr(llm, "queries_keys_values", queries_keys_values)


def eps_outside_the_root(monkeypatch, weights, config):
    def rms_norm(x, weight, eps):
        return weight * x / (mx.sqrt(mx.mean(x * x, axis=-1, keepdims=True)) + eps)

    monkeypatch.setattr(llm, "rms_norm", rms_norm)


def wrong_theta(monkeypatch, weights, config):
    config["rope_theta"] = 10000


def position_of_a_step_forgotten(monkeypatch, weights, config):
    apply_rope = llm.apply_rope
    monkeypatch.setattr(llm, "apply_rope", lambda x, offset, theta: apply_rope(x, 0, theta))


def exchange(weights, one, other):
    weights[one], weights[other] = weights[other], weights[one]


def gate_and_up_swapped(monkeypatch, weights, config):
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.mlp"
        exchange(weights, f"{name}.gate_proj.weight", f"{name}.up_proj.weight")


def silu_of_up(monkeypatch, weights, config):
    def ffn(x, weights, layer):
        name = f"model.layers.{layer}.mlp"
        gate = llm.linear(x, weights, f"{name}.gate_proj")
        up = llm.linear(x, weights, f"{name}.up_proj")
        return llm.linear(gate * up * mx.sigmoid(up), weights, f"{name}.down_proj")

    monkeypatch.setattr(llm, "ffn", ffn)


def q_proj_of_two_layers_exchanged(monkeypatch, weights, config):
    name = "model.layers.{}.self_attn.q_proj.weight"
    exchange(weights, name.format(1), name.format(2))


def no_mask(monkeypatch, weights, config):
    def dot_product_attention(q, k, v):
        q, k, v = q[None], k[None], v[None]
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5)[0]

    monkeypatch.setattr(llm, "dot_product_attention", dot_product_attention)


def no_residual_around_attention(monkeypatch, weights, config):
    def transformer_block(x, weights, config, layer, cache, offset):
        name = f"model.layers.{layer}"
        eps = config["rms_norm_eps"]
        normed = llm.rms_norm(x, weights[f"{name}.input_layernorm.weight"], eps)
        x = llm.attention(normed, weights, config, layer, cache, offset)
        normed = llm.rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
        return x + llm.ffn(normed, weights, layer)

    monkeypatch.setattr(llm, "transformer_block", transformer_block)


def not_a_number(monkeypatch, weights, config):
    weights["model.norm.weight"][3] = mx.nan


PLANTED = [  # the mistake, and where it first shows
    (interleaved_pairs, "layer 0, q after rotation"),
    (no_qk_norm, "layer 0, q after norm"),
    (no_call_of_qk_norm, "layer 0, q after norm"),
    (eps_outside_the_root, "layer 0, norm before attention"),
    (wrong_theta, "layer 0, q after rotation"),
    (position_of_a_step_forgotten, "layer 0, q after rotation"),
    (gate_and_up_swapped, "layer 0, gate"),
    (silu_of_up, "layer 0, ffn out"),
    (q_proj_of_two_layers_exchanged, "layer 1, q after projection"),
    (no_mask, "layer 0, attention out"),
    (no_residual_around_attention, "layer 0, norm before ffn"),
    (not_a_number, "final norm"),
]


def write_model(folder, **changes):
    """Random weights; eps is large enough for its place to matter."""
    return write_checkpoint(folder, make_config(rms_norm_eps=1e-3, **changes))


@pytest.fixture(scope="module", name="model")
def write_model_once(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("compare") / "model")


@pytest.fixture(scope="module", name="right")
def record_once(model):
    weights, config, _ = llm.load(model)
    return compare.record_port(IDS, weights, config)


@pytest.mark.parametrize(
    ("mistake", "place"), PLANTED, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_first_difference_is_where_the_mistake_is(model, right, monkeypatch, mistake, place):
    weights, config, _ = llm.load(model)
    mistake(monkeypatch, weights, config)
    differences = compare.compare(compare.record_port(IDS, weights, config), right)
    found = compare.verdict(differences, compare.BOUNDS["float32"])
    assert found.startswith(f"The first beyond 0.0001: {place}. Usual causes: "), found


def test_all_is_kept_and_the_file_is_left_as_it_was(model, right):
    functions = [vars(llm)[name] for name in ("embed", "linear", "rms_norm", "queries_keys_values")]
    weights, config, _ = llm.load(model)
    again = compare.record_port(IDS, weights, config)
    assert functions == [
        vars(llm)[name] for name in ("embed", "linear", "rms_norm", "queries_keys_values")
    ]
    ends = ["embed_tokens", "norm", "lm_head"]
    in_layer = [name for name in compare.STAGES if name not in ends]
    expected = {f"{layer}.{name}" for layer in range(3) for name in in_layer} | {*ends}
    assert right.keys() == expected
    assert all(len(rows) == len(IDS) for rows in right.values())
    differences = compare.compare(again, right)
    assert set(differences.values()) == {0.0}
    assert compare.verdict(differences, 1e-4).startswith("All are within 0.0001")
    cache = llm.make_cache(weights, config, len(IDS))  # fed at once, not in two parts
    logits = llm.head(llm.hidden_states(IDS, weights, config, cache, 0), weights, config)
    assert mx.abs(logits - right["lm_head"]).max().item() < 1e-4


def test_an_untied_head_is_kept_as_logits(tmp_path):
    weights, config, _ = llm.load(write_model(tmp_path / "untied", tie_word_embeddings=False))
    record = compare.record_port(IDS, weights, config)
    assert record["lm_head"].shape == (len(IDS), config["vocab_size"])
    assert record["embed_tokens"].shape == (len(IDS), config["hidden_size"])


def test_largest_difference_over_largest_value():
    expected = {"0.q_proj": mx.array([[1.0, -8.0]]), "norm": mx.ones((1, 2)), "lm_head": mx.ones(2)}
    found = {"0.q_proj": mx.array([[1.0, -6.0]]), "norm": mx.ones((2, 2))}
    differences = compare.compare(found, expected)
    assert differences == {"0.q_proj": 0.25, "norm": math.inf, "lm_head": math.inf}


def test_what_is_missing_and_what_is_wrong(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["compare.py", str(MINI)])
    with pytest.raises(ValueError, match="pip install torch transformers"):
        compare.main()
    for arguments in (["--dtype", "float64"], ["--temperature", "1"]):
        usage = run(*arguments, module="examples.compare")
        assert usage.code == 2 and usage.err.startswith("compare.py: error: "), usage
        assert len(usage.err.splitlines()) == 1
    page = run("--help", module="examples.compare").out
    assert "Example: python -m examples.compare tests/Qwen3-mini" in " ".join(page.split())
