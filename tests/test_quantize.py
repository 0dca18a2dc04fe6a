"""examples/quantize.py: what it writes, what it says that this costs, what it leaves behind."""

import json
import resource
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import MINI, make_config, write_checkpoint
from terminal import Result, assert_one_complaint, command_line, place, run

import llm_inference as llm
from examples import checkpoint, quantize
from examples.check import tensor_shapes
from examples.common import encode

MODULE = "examples.quantize"
# bits -> largest mean KL (measured: 0.68, 0.035, 0.0040, 0.0007, 0.0002, 0.00005), agreement.
COSTS = {2: (1.5, 0.6), 3: (0.1, 0.95), 4: (0.012, 0.98), 5: (2e-3, 0.98), 6: (6e-4, 0.99)}
COSTS |= {8: (2e-4, 0.99)}


@pytest.fixture(scope="module")
def model():
    return llm.load(MINI)


def greedy(weights, config, tokenizer, text="The capital of France is", count=24):
    ids = encode(text, tokenizer)
    return list(llm.generate(ids, weights, config, config["eos_token_id"], count))


def test_a_folder_that_runs(tmp_path, model):
    target = tmp_path / "small"
    result = run(MINI, target, "--bits", 4, "--group-size", 32, "--embed-bits", 8, module=MODULE)
    assert result.code == 0 and not result.err, result
    weights, config, tokenizer = llm.load(target)
    sizes = [sum(array.nbytes for array in part.values()) for part in (model[0], weights)]
    bytes_line, cost_line = result.out.splitlines()
    assert bytes_line.startswith(f"{sizes[0]:,} bytes became {sizes[1]:,} "), result
    assert cost_line.startswith("over 205 tokens: mean KL 0.00"), result
    found = json.loads((target / "config.json").read_bytes())
    plan = {"group_size": 32, "bits": 4, "mode": "affine"}
    plan["model.embed_tokens"] = {"group_size": 32, "bits": 8}
    assert found.pop("quantization") == found.pop("quantization_config") == plan
    assert found == json.loads((MINI / "config.json").read_bytes())
    for name in ("tokenizer.json", "generation_config.json", "README.md"):
        assert (target / name).read_bytes() == (MINI / name).read_bytes()
    assert list(tmp_path.iterdir()) == [target]

    # The tokens are those of the same numbers, unpacked.
    plain = {}
    for name, shape in tensor_shapes(config).items():
        W, packing = llm.matrix(weights, name, shape[-1])
        plain[f"{name}.weight"] = mx.dequantize(W, **packing) if packing else W
        source = np.array(model[0][f"{name}.weight"].astype(mx.float32))
        error = np.abs(np.array(plain[f"{name}.weight"].astype(mx.float32)) - source).max()
        bits = 8 if name in quantize.TABLES else 4
        rounded = np.abs(source).max() / 128  # scales and biases are bfloat16
        assert error <= np.ptp(source) / (2**bits - 1) + rounded, name
    assert greedy(weights, config, tokenizer) == greedy(plain, config, tokenizer)


def test_what_each_number_of_bits_costs(model):
    weights, config, tokenizer = model
    ids = encode("The capital of France is", tokenizer)
    ids += greedy(weights, config, tokenizer, count=120)
    before = quantize.log_probabilities(ids, weights, config)
    past = float("inf")
    for bits, (most, agreement) in COSTS.items():
        smaller, _ = quantize.quantize(weights, config, bits, 64)
        kl, same = quantize.cost(before, quantize.log_probabilities(ids, smaller, config))
        assert 0 < kl < min(most, past) and same >= agreement, (bits, kl, same)
        past = kl


def test_the_cost_is_what_it_says():
    rng = np.random.default_rng(0)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in rng.normal(size=(2, 50, 9)))
    kl, same = quantize.cost(mx.array(np.log(p)), mx.array(np.log(q)))
    assert kl == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-4)
    assert same == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())


def test_measured_on_a_text(tmp_path):
    (tmp_path / "text").write_text("Paris is in Europe. " * 3)
    (tmp_path / "empty").write_text("")
    result = run(MINI, tmp_path / "out", "--text", tmp_path / "text", module=MODULE)
    ids = encode("Paris is in Europe. " * 3, llm.load(MINI, lazy=True)[2])
    assert f"over {len(ids)} tokens" in result.out, result
    result = run(MINI, tmp_path / "out2", "--text", tmp_path / "empty", module=MODULE)
    assert "empty" in assert_one_complaint(result, 2)
    assert not (tmp_path / "out2").exists()


def test_an_untied_head_has_the_bits_of_the_embedding(tmp_path):
    config = make_config(tie_word_embeddings=False, num_hidden_layers=1)
    weights, config, _ = llm.load(write_checkpoint(tmp_path / "source", config))
    packed, plan = quantize.quantize(weights, config, 4, 32, 6)
    bits = {"group_size": 32, "bits": 6}
    assert plan["model.embed_tokens"] == plan["lm_head"] == bits and plan["bits"] == 4
    for name, number in {
        "lm_head": 6,
        "model.embed_tokens": 6,
        "model.layers.0.mlp.up_proj": 4,
    }.items():
        _, packing = llm.matrix(packed, name, 64)
        assert (packing["group_size"], packing["bits"]) == (32, number)


def test_shards(tmp_path, monkeypatch, model):
    """Files are cut before a tensor that does not fit, hold each once, and load as one would."""
    monkeypatch.setattr(checkpoint, "SHARD", 300_000)
    with checkpoint.folder_beside(tmp_path / "out") as folder:
        checkpoint.write(MINI, folder, model[0], {})
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert max(sum(a.nbytes for a in mx.load(str(file)).values()) for file in files[1:]) <= 300_000
    again = llm.load(tmp_path / "out")[0]
    assert again.keys() == model[0].keys()
    assert all(mx.array_equal(again[name], model[0][name]).item() for name in again)


def test_refusals(tmp_path, monkeypatch):
    small = tmp_path / "small"
    monkeypatch.setattr(sys, "argv", ["quantize.py", str(MINI), str(small)])
    quantize.main()
    assert "exists already" in assert_one_complaint(run(MINI, small, module=MODULE))
    for arguments, reason in {
        (MINI, small): "exists already",
        (small, tmp_path / "new"): "quantized already",
        (MINI, tmp_path / "new", "--group-size", 128): "have 64 numbers: no groups of 128",
        (MINI, tmp_path / "no" / "new"): "no/new",
    }.items():
        monkeypatch.setattr(sys, "argv", ["quantize.py", *map(str, arguments)])
        with pytest.raises((ValueError, OSError), match=reason):
            quantize.main()
    assert list(tmp_path.iterdir()) == [small]


def test_a_write_that_is_cut_leaves_nothing(tmp_path):
    limit = 200_000  # bytes a file may have: the disk is full
    process = subprocess.run(
        [*command_line(module=MODULE), MINI, tmp_path / "out"],
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        **place(MODULE, None, {}),
    )
    assert_one_complaint(Result(process, "quantize.py"))
    assert not list(tmp_path.iterdir())


def test_nothing_has_the_name_before_all_is_there(tmp_path):
    with pytest.raises(KeyboardInterrupt), checkpoint.folder_beside(tmp_path / "out") as folder:
        assert folder.is_dir() and not (tmp_path / "out").exists()
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
