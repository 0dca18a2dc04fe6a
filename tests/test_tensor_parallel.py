"""examples/tensor_parallel.py: shares in this process, and real ranks started by mlx.launch."""

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from checkpoints import MINI, make_config, quantize, random_weights, write_checkpoint
from terminal import FRAMING, ROOT, START, Result, assert_one_complaint, environment, mini, run

import llm_inference as llm
from examples import tensor_parallel
from examples.common import encode

MODULE = "examples.tensor_parallel"
IDS = [5, 17, 3, 99, 1000, 64, 2, 800]


def free_ports(count):
    """The first of `count` ports in a row that nobody listens on."""
    for first in range(30000, 60000, 97):
        try:
            for port in range(first, first + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise AssertionError("no free ports")


def launch(ranks, *arguments, program=("-m", MODULE), timeout=60):
    """The ranks as mlx.launch starts them. Its warnings are no lines of the result."""
    launcher = shutil.which("mlx.launch", path=Path(sys.executable).parent) or "mlx.launch"
    process = subprocess.run(
        [launcher, "-n", str(ranks), "--backend", "ring"]
        + ["--starting-port", str(free_ports(ranks)), "--", sys.executable]
        + [*program, *map(str, arguments)],
        capture_output=True,
        cwd=ROOT,
        env=environment(),
        timeout=timeout,
    )
    result = Result(process, "tensor_parallel.py")
    result.warnings = [line for line in result.lines if "[WARN]" in line]
    result.lines = [line for line in result.lines if "[WARN]" not in line]
    return result


# ---- In this process


@pytest.fixture(scope="module", name="model")
def write_model(tmp_path_factory):
    config = make_config(head_dim=64, intermediate_size=256)
    return write_checkpoint(tmp_path_factory.mktemp("ranks") / "model", config)


def shares(folder, size):
    """Weights and config of every rank."""
    found = []
    for rank in range(size):
        weights, config, _ = llm.load(folder, lazy=True)
        tensor_parallel.keep_share(weights, rank, size)
        heads = {name: config[name] // size for name in tensor_parallel.HEADS}
        found.append((weights, config | heads))
    return found


def largest_difference(one, other):
    return mx.abs(one - other).max().item()


@pytest.mark.parametrize("bits", [None, 4, 3])
def test_what_the_ranks_add_is_the_whole(model, tmp_path, bits):
    weights, config, _ = llm.load(model)
    if bits:
        packed, new_config = quantize(
            weights, make_config(head_dim=64, intermediate_size=256), bits, 32
        )
        weights, config, _ = llm.load(write_checkpoint(tmp_path / "packed", new_config, packed))
    folder = tmp_path / "packed" if bits else model
    x = mx.random.normal((5, 64))
    attended = 0
    fed_forward = 0
    for part, part_config in shares(folder, 2):
        cache = llm.make_cache(part, part_config, 5)
        assert cache[0][0].shape == (1, 5, 64)
        attended += llm.attention(x, part, part_config, 1, cache, 0)
        fed_forward += llm.ffn(x, part, 1)
    cache = llm.make_cache(weights, config, 5)
    assert largest_difference(attended, llm.attention(x, weights, config, 1, cache, 0)) < 1e-4
    assert largest_difference(fed_forward, llm.ffn(x, weights, 1)) < 1e-4


def test_every_number_is_on_one_rank_or_on_all(model):
    whole, _, _ = llm.load(model)
    one, two = (weights for weights, _ in shares(model, 2))
    for name in whole:
        axis = tensor_parallel.SPLIT_AXIS.get(name.split(".")[-2])
        if axis is None:
            assert mx.array_equal(one[name], whole[name]), name
        else:
            assert mx.array_equal(mx.concatenate([one[name], two[name]], axis), whole[name]), name


def test_wholes_are_let_go_one_by_one(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "head_dim": 64}
    folder = write_checkpoint(tmp_path / "larger", make_config(**sizes))
    weights, _, _ = llm.load(folder, lazy=True)
    embedding = weights["model.embed_tokens.weight"].nbytes
    blocks = sum(array.nbytes for array in weights.values()) - embedding
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    tensor_parallel.keep_share(weights, 1, 2)
    resting = mx.get_active_memory() - before
    peak = mx.get_peak_memory() - before
    print(f"blocks: {resting - embedding} at rest, {peak - embedding} at the peak, of {blocks}")
    assert resting - embedding <= 0.52 * blocks
    assert peak - embedding <= 0.65 * blocks


@pytest.mark.parametrize(
    ("changes", "bits", "size", "words"),
    [
        ({"intermediate_size": 97}, None, 2, "97 columns of model.layers.0.mlp.down_proj"),
        ({"intermediate_size": 160}, 3, 2, "5 groups of columns of model.layers.0.mlp.down_proj"),
    ],
)
def test_parts_that_do_not_divide(tmp_path, changes, bits, size, words):
    config = make_config(**changes)
    weights = random_weights(config)
    if bits:
        weights, config = quantize(weights, config, bits, 32)
    weights, _, _ = llm.load(write_checkpoint(tmp_path / "odd", config, weights), lazy=True)
    with pytest.raises(ValueError, match=words):
        tensor_parallel.keep_share(weights, 0, size)


# ---- Real processes


def text_of(result):
    assert result.code == 0 and "Traceback" not in result.err, result
    return result.out


MEMORY = re.compile(r"Memory of rank (\d): ([\d.]+) MB at rest, ([\d.]+) MB at its peak")


def test_one_rank_and_two_say_the_same():
    weights, config, tokenizer = llm.load(MINI, dtype=mx.float32)
    ids = encode(START, tokenizer)
    expected = list(llm.generate(ids, weights, config, config["eos_token_id"], max_tokens=12))
    flags = ["--model", MINI, "--dtype", "float32", "--max-tokens", 12, START]
    alone = run(*flags, module=MODULE)
    together = launch(2, *flags)
    assert text_of(alone) == text_of(together) == tokenizer.decode(expected) + "\n"
    assert together.lines[0] == "Model: Qwen3-mini, on 2 ranks"
    assert alone.lines[0] == "Model: Qwen3-mini, on 1 rank"
    assert not together.warnings
    whole = [float(number) for number in MEMORY.fullmatch(alone.lines[-1]).groups()]
    for rank in (0, 1):
        number, resting, peak = map(float, MEMORY.fullmatch(together.lines[1 + rank]).groups())
        assert number == rank
        assert resting <= peak < whole[1]
        assert resting < 0.75 * whole[1]
    assert len(together.lines) == 3


def test_a_seed_gives_the_same_draws():
    flags = ["--dtype", "float32", "--temperature", 1.5, "--seed", 3, "--max-tokens", 12]
    assert text_of(launch(2, "--model", MINI, *flags)) == text_of(mini(*flags, module=MODULE))


EACH_RANK = """
import argparse, json, random
import mlx.core as mx
import llm_inference as llm
from examples import tensor_parallel as tp
group = mx.distributed.init()
args = argparse.Namespace(model="tests/Qwen3-mini", dtype="float32")
weights, config, tokenizer = tp.load_share(args, group.rank(), group.size())
tp.add_over_ranks(group.rank())
tokens = list(llm.generate([5, 6, 7], weights, config, (), max_tokens=8, temperature=3.0))
rows = tp.from_all_ranks(group.size(), config["num_key_value_heads"], *tokens)
if group.rank() == 0:
    print(json.dumps(rows))
"""


def test_without_a_seed_all_ranks_still_choose_alike():
    one, two = json.loads(text_of(launch(2, program=("-c", EACH_RANK))))
    assert len(one) == 9 and one == two
    assert one[0] == 1  # of the miniature's two KV heads, so a cache of half the size


FAILS_ON_RANK_1 = """
import os, sys
import llm_inference as llm
from examples import tensor_parallel as tp
model = "nowhere" if os.environ["MLX_RANK"] == "1" else "tests/Qwen3-mini"
sys.argv = ["tensor_parallel.py", "--model", model]
llm.run(tp.main)
"""


def test_one_sentence_from_rank_0():
    result = launch(4, "--model", MINI)
    assert "4 ranks cannot share 2 num_key_value_heads" in complaint(result)
    assert len(result.warnings) == 4  # each has ended with an error
    assert "rank 1 cannot load its share" in complaint(launch(2, program=("-c", FAILS_ON_RANK_1)))
    assert "nowhere/config.json is missing" in complaint(launch(2, "--model", "nowhere"))
    assert_one_complaint(run("--model", "nowhere", module=MODULE))
    usage = launch(2, "--nonsense")
    assert len(usage.lines) == 1 and "unrecognized arguments" in usage.err


def complaint(result):
    assert not result.out and "Traceback" not in result.err, result
    assert result.lines[-1].startswith("tensor_parallel.py: "), result
    assert all(FRAMING.fullmatch(line) for line in result.lines[:-1]), result
    return result.lines[-1]
