"""What if one machine is too small for the model, or too slow?

Several processes, called ranks, share it: each takes some of the heads and a part of F, which is
some rows of q, k, v, gate and up, and the columns of o and down that belong to them. With these it
computes a part of what attention and feed-forward add to the residual stream; the sum over all
ranks is the whole. So two small sums a layer travel between the machines, and no weights.

    mlx.launch -n 2 python -m examples.tensor_parallel "The capital of France is"
    python -m examples.tensor_parallel "The capital of France is"     one rank, for comparison

Two Macs: mlx.launch --hostfile hosts.json --backend ring (not tried on two machines). The network
is MLX's: ml-explore.github.io/mlx, "Distributed Communication". Paper: arXiv 1909.08053.
"""

import os
import time

import mlx.core as mx

import llm_inference as llm
from examples.check import load
from examples.common import encode, model_name

SPLIT_AXIS = dict.fromkeys(["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], 0)  # rows
SPLIT_AXIS |= dict.fromkeys(["o_proj", "down_proj"], 1)  # columns; all others are kept whole
HEADS = ["num_attention_heads", "num_key_value_heads"]


def main():
    group = mx.distributed.init()
    rank = group.rank()
    size = group.size()
    if rank > 0:  # only rank 0 speaks, and MLX's own messages are no exception
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
    usual = "The capital of France is"
    parser = llm.argument_parser(
        "Continue a text on several machines or processes. "
        f'Example: mlx.launch -n 2 python -m examples.tensor_parallel "{usual}"'
    )
    parser.add_argument("prompt", nargs="*", default=[usual], help=f'"{usual}"')
    try:
        args = parser.parse_intermixed_args()
    except SystemExit:
        if rank > 0:
            time.sleep(1)  # the first rank that ends takes the others with it: rank 0 speaks before
        raise
    weights, config, tokenizer = load_share(args, rank, size)
    at_rest = mx.get_active_memory()
    add_over_ranks(rank)
    ids = encode(" ".join(args.prompt), tokenizer)
    tokens = llm.generate(ids, weights, config, config["eos_token_id"], **llm.options(args))
    llm.stream(tokens, tokenizer, [])
    for other, numbers in enumerate(from_all_ranks(size, at_rest, mx.get_peak_memory())):
        resting, peak = (f"{number / 1e6:.1f} MB" for number in numbers)
        llm.note(f"Memory of rank {other}: {resting} at rest, {peak} at its peak")


def load_share(args, rank, size):
    """This rank's part of the weights, and a config with its numbers of heads."""
    failure = None
    try:
        folder = llm.find_model(args.model)
        dtype = getattr(mx, args.dtype) if args.dtype else None
        weights, config, tokenizer = load(folder, dtype=dtype, lazy=True)
        for heads in HEADS:
            config[heads] = divide(config[heads], size, heads)
        keep_share(weights, rank, size)
    except Exception as error:  # not raised yet: the others must not wait for this rank for ever
        failure = error
    failed = [other for other, (bad,) in enumerate(from_all_ranks(size, bool(failure))) if bad]
    if failed:
        if rank > 0:
            time.sleep(1)  # as above
        raise failure or ValueError(f"rank {failed[0]} cannot load its share: run it there alone")
    llm.note(f"Model: {model_name(folder.resolve())}, on {size} rank{'s' * (size > 1)}")
    return weights, config, tokenizer


def keep_share(weights, rank, size):
    """Replace each split matrix by this rank's part. Of a quantized one, packed numbers, scales and
    biases are split alike; columns only between groups.
    """
    for name in sorted(weights):  # so groups, in biases, are counted before packed numbers
        matrix, _, part = name.rpartition(".")
        axis = SPLIT_AXIS.get(matrix.rpartition(".")[-1])
        if axis is not None:
            columns = "columns" if part == "weight" else "groups of columns"
            what = columns if axis else "rows"
            divide(weights[name].shape[axis], size, f"{what} of {matrix}")
            # A slice keeps the whole alive; a contiguous copy does not.
            weights[name] = mx.contiguous(mx.split(weights[name], size, axis)[rank])
        mx.eval(weights[name])  # one by one: at no time are there more wholes than this one
    mx.clear_cache()


def divide(count, size, what):
    if count % size:
        raise ValueError(f"{size} ranks cannot share {count} {what} evenly")
    return count // size


def add_over_ranks(rank):
    """Put a sum over all ranks behind attention and feed-forward, and let rank 0 choose."""
    attention = llm.attention
    ffn = llm.ffn
    sample = llm.sample

    def sample_on_rank_0(*arguments, **options):
        # Other machines may round, and draw, in another way.
        # Times 0 and not just a 0: sums are matched by their order, so all ranks must need
        # the same ones, and a 0 alone would need none of the layers' sums.
        return mx.distributed.all_sum(sample(*arguments, **options) * (rank == 0))

    llm.attention = lambda *arguments: mx.distributed.all_sum(attention(*arguments))
    llm.ffn = lambda *arguments: mx.distributed.all_sum(ffn(*arguments))
    llm.sample = sample_on_rank_0


def from_all_ranks(size, *numbers):
    """The numbers of each rank, in a list of rows. Every rank waits here for all the others."""
    rows = mx.distributed.all_gather(mx.array(numbers, dtype=mx.float32))
    return rows.reshape(size, -1).tolist()


if __name__ == "__main__":
    llm.run(main)
