"""examples/long_context.py, compare.py and tensor_parallel.py at length: transformers as the judge
of the first two, real processes and larger random models for the third."""

import copy
import re

import mlx.core as mx
import numpy as np
import pytest
import torch
from checkpoints import MINI, make_config, quantize, random_weights, write_checkpoint
from terminal import assert_one_complaint, run
from test_compare import PLANTED, write_model
from test_tensor_parallel import MEMORY, launch, text_of
from transformers import Qwen3ForCausalLM
from transformers.utils import logging

import llm_inference as llm
from examples import compare, long_context
from examples.common import encode

logging.disable_progress_bar()
IDS = [5, 17, 3, 99, 1000, 64, 2, 800]


# ---- long_context: logits below and beyond the original length


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def our_logits(weights, config, ids):
    """Of all positions: read in chunks, the last four one by one."""
    cache = llm.make_cache(weights, config, len(ids))
    ends = [*range(100, len(ids) - 4, 100), *range(len(ids) - 4, len(ids) + 1)]
    rows = []
    start = 0
    for end in ends:
        x = llm.hidden_states(ids[start:end], weights, config, cache, start)
        rows.append(llm.head(x, weights, config))
        start = end
    return np.array(mx.concatenate(rows))


STRETCHED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn 2.5": {"rope_type": "yarn", "factor": 2.5, "beta_fast": 16.0, "beta_slow": 2.0},
    "original": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "attention_factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
    "mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.5},
    "not truncated": {"rope_type": "yarn", "factor": 4.0, "truncate": False},
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "rope_scaling") for name in STRETCHED]
    + [("linear", "rope_parameters"), ("yarn", "rope_parameters")],
)
def test_logits_with_the_same_rope_parameters(tmp_path, monkeypatch, name, layout):
    parameters = dict(STRETCHED[name])
    length = 1024 if name == "original" else 256
    config = make_config(max_position_embeddings=length, head_dim=64)
    if layout == "rope_parameters":
        parameters["rope_theta"] = config.pop("rope_theta")
        del config["rope_scaling"]
    folder = write_checkpoint(tmp_path / "model", config | {layout: parameters})
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights, config, _ = llm.load(folder, stretched_rope=True)
    config = long_context.stretch(config)
    assert config["max_position_embeddings"] == max(length, 256 * config["factor"])
    monkeypatch.setattr(llm, "apply_rope", long_context.rope(config))
    for count in (60, 700):
        ids = np.random.default_rng(count).integers(0, 2048, count).tolist()
        expected = logits_of(model, ids)
        error = np.abs(our_logits(weights, config, ids) - expected).max() / np.abs(expected).max()
        print(f"{name}, {count} of {length} positions: {error:.1e} of the largest logit")
        assert error < 1e-5


def test_flags_do_what_a_config_does(tmp_path, monkeypatch):
    """The miniature with --method yarn --factor 4, against transformers told the same."""
    model = Qwen3ForCausalLM.from_pretrained(
        MINI, dtype=torch.float32, rope_parameters=STRETCHED["yarn"] | {"rope_theta": 1e6}
    ).eval()
    weights, config, tokenizer = llm.load(MINI, dtype=mx.float32)
    config = long_context.stretch(config, "yarn", 4.0)
    monkeypatch.setattr(llm, "apply_rope", long_context.rope(config))
    ids = encode(" ".join(["The capital of France is Paris."] * 400), tokenizer)[:2100]
    expected = logits_of(model, ids)
    error = np.abs(our_logits(weights, config, ids) - expected).max() / np.abs(expected).max()
    assert error < 1e-5


# ---- compare: mistakes planted in the file


@pytest.fixture(scope="module", name="model")
def write_models(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("compare") / "model")


@pytest.fixture(scope="module", name="original")
def record_original(model):
    return compare.record_original(IDS, model, "float32")


def test_transformers_and_the_file_agree(model, original):
    weights, config, _ = llm.load(model)
    differences = compare.compare(compare.record_port(IDS, weights, config), original)
    assert max(differences.values()) < 1e-5, differences
    names = [place.rpartition(".")[-1] for place in original]
    assert names[:15] == list(compare.STAGES)[:14] + ["input_layernorm"]
    assert names[-2:] == ["norm", "lm_head"] and len(names) == 3 + 3 * 13


@pytest.mark.parametrize(
    ("mistake", "place"), PLANTED, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_first_difference_is_where_the_mistake_is(model, original, monkeypatch, mistake, place):
    weights, config, _ = llm.load(model)
    mistake(monkeypatch, weights, copy.copy(config))
    config = config | ({"rope_theta": 10000} if "theta" in mistake.__name__ else {})
    differences = compare.compare(compare.record_port(IDS, weights, config), original)
    found = compare.verdict(differences, compare.BOUNDS["float32"])
    assert found.startswith(f"The first beyond 0.0001: {place}. "), found


def said(capsys, monkeypatch, *arguments):
    """The lines of the command, run in this process: importing transformers takes seconds."""
    monkeypatch.setattr("sys.argv", ["compare.py", *map(str, arguments)])
    compare.main()
    return capsys.readouterr().out.splitlines()


def test_the_command():
    result = run(MINI, module="examples.compare", timeout=120)
    assert result.code == 0, result
    lines = result.out.splitlines()
    assert lines[0] == "5 tokens, float32: the largest difference over the largest value"
    assert len(lines) == 1 + 3 + 6 * 13 + 1
    assert re.fullmatch(r" *\d\.\de[+-]\d\d  layer 0, q after rotation", lines[8]), lines[8]
    assert lines[-1].startswith("All are within ")


@pytest.mark.parametrize("dtype", compare.BOUNDS)
def test_types(capsys, monkeypatch, dtype):
    lines = said(capsys, monkeypatch, MINI, "--dtype", dtype)
    assert lines[-1].startswith("All are within "), lines
    found = max(float(line.split()[0]) for line in lines[1:-1])
    print(f"{dtype}: {found:.1e}, the bound is {compare.BOUNDS[dtype]:.0e}")
    interleaved_pairs = PLANTED[0][0]  # and the bound is not too wide to see a mistake
    interleaved_pairs(monkeypatch, None, None)
    assert "layer 0, q after rotation" in said(capsys, monkeypatch, MINI, "--dtype", dtype)[-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"num_key_value_heads": 4, "head_dim": 64},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_any_dense_folder(capsys, monkeypatch, tmp_path, changes):
    lines = said(capsys, monkeypatch, write_model(tmp_path / "model", **changes))
    assert lines[-1].startswith("All are within"), lines


def test_folders_that_are_refused(capsys, monkeypatch, tmp_path):
    moe = make_config(model_type="qwen3_moe", num_experts=8, moe_intermediate_size=32)
    folder = write_checkpoint(tmp_path / "moe", moe, {"x": mx.zeros(1)})
    new = "qwen3_moe.*new keys in its config: moe_intermediate_size, num_experts$"
    with pytest.raises(ValueError, match=new):
        said(capsys, monkeypatch, folder)
    bias = write_checkpoint(tmp_path / "bias", make_config(attention_bias=True))
    with pytest.raises(ValueError, match="attention_bias.*new keys in its config: none$"):
        said(capsys, monkeypatch, bias)
    config = make_config()
    packed, config = quantize(random_weights(config), config, 4, 32)
    with pytest.raises(ValueError, match="is quantized: compare the folder"):
        said(capsys, monkeypatch, write_checkpoint(tmp_path / "packed", config, packed))
    with pytest.raises(SystemExit):
        said(capsys, monkeypatch, MINI, "--prompt", "A")
    assert "less than 2 tokens" in capsys.readouterr().err
    assert_one_complaint(run("/nowhere", module="examples.compare", timeout=120))


# ---- tensor_parallel: ranks


def tokens_alone(folder, dtype=None, count=12):
    weights, config, tokenizer = llm.load(folder, dtype=dtype)
    ids = encode("The capital of France is", tokenizer)
    found = list(llm.generate(ids, weights, config, (), max_tokens=count))
    return tokenizer.decode(found, skip_special_tokens=False) + "\n"


@pytest.mark.parametrize(
    ("ranks", "bits"), [(1, None), (1, 4), (2, None), (2, 4), (2, 8), (4, None), (4, 4)]
)
def test_the_same_tokens_as_alone(tmp_path, ranks, bits):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 256}
    config = make_config(eos_token_id=None, vocab_size=2048, **sizes)
    weights = random_weights(config, seed=7)
    if bits:
        weights, config = quantize(weights, config, bits, 32)
    folder = write_checkpoint(tmp_path / "model", config, weights)
    for file in folder.glob("*config.json"):  # no end: the random model never means one
        if file.name != "config.json":
            file.unlink()
    flags = ["--model", folder, "--dtype", "float32", "--max-tokens", 12]
    if ranks == 1:
        result = run(*flags, module="examples.tensor_parallel")
    else:
        result = launch(ranks, *flags)
    assert text_of(result) == tokens_alone(folder, mx.float32)
    assert len(MEMORY.findall(result.err)) == ranks


@pytest.mark.parametrize("bits", [None, 4])
def test_memory_of_two_ranks(tmp_path, bits):
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "head_dim": 64}
    config = make_config(num_attention_heads=8, num_key_value_heads=4, **sizes)
    weights = random_weights(config)
    if bits:
        weights, config = quantize(weights, config, bits, 64)
    blocks = sum(array.nbytes for name, array in weights.items() if "layers" in name) / 1e6
    rest = sum(array.nbytes for array in weights.values()) / 1e6 - blocks
    folder = write_checkpoint(tmp_path / "model", config, weights)
    del weights
    result = launch(2, "--model", folder, "--max-tokens", 4)
    assert result.code == 0, result
    for _, resting, peak in MEMORY.findall(result.err):
        print(
            f"blocks {blocks:.1f} MB, the rest {rest:.1f} MB: {resting} MB at rest, {peak} MB at the peak"
        )
        assert float(resting) - rest <= 0.52 * blocks
        assert float(peak) - rest <= 0.65 * blocks
