"""Does a port compute what the original computes, and if not, where does it go wrong?

A wrong word at the end says only that something is wrong. So both programs read the same ids, all
that they compute on the way is kept, and is compared in the order of computation: the first result
that differs is where the mistake is, and the later ones only follow from it.

    python -m examples.compare tests/Qwen3-mini

The original is transformers, which has to be installed: pip install torch transformers.
Its code: github.com/huggingface/transformers, src/transformers/models/qwen3/modeling_qwen3.py.
"""

import argparse
import importlib.util
import math

import mlx.core as mx

import llm_inference as llm
from examples import check
from examples.common import encode
from examples.stages import STAGES, record_original, record_port

BOUNDS = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}


def main():
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description="Compare llm_inference.py with transformers, number by number. "
        "Example: python -m examples.compare tests/Qwen3-mini",
    )
    parser.add_argument("model", nargs="?", help="a folder (the one llm_inference.py would run)")
    parser.add_argument("--prompt", default="The capital of France is", help="(%(default)s)")
    parser.add_argument("--dtype", choices=BOUNDS, default="float32", help="(%(default)s)")
    args = parser.parse_args()
    if not importlib.util.find_spec("torch") or not importlib.util.find_spec("transformers"):
        raise ValueError("the original is missing: pip install torch transformers")
    folder = llm.find_model(args.model)
    weights, config, tokenizer = load(folder, args.dtype)
    ids = encode(args.prompt, tokenizer)
    if len(ids) < 2:
        parser.error("the prompt has less than 2 tokens, and position 0 hides mistakes")
    original = record_original(ids, folder, args.dtype)
    differences = compare(record_port(ids, weights, config), original)
    print(f"{len(ids)} tokens, {args.dtype}: the largest difference over the largest value")
    for place, difference in differences.items():
        print(f"{difference:8.1e}  {describe(place)}")
    print(verdict(differences, BOUNDS[args.dtype]), flush=True)


def load(folder, dtype):
    """As check.load; where that refuses a folder, this says which keys of its config are new."""
    from transformers import Qwen3Config

    try:
        weights, config, tokenizer = check.load(folder, dtype=getattr(mx, dtype))
    except ValueError as error:
        known = Qwen3Config().to_dict().keys() | {"rope_theta", "rope_scaling", "torch_dtype"}
        new = sorted(check.read(folder / "config.json").keys() - known)
        raise ValueError(f"{error}; new keys in its config: {', '.join(new) or 'none'}") from None
    if "bits" in config:
        raise ValueError(f"{folder} is quantized: compare the folder that it was made from")
    return weights, config, tokenizer


def compare(found, expected):
    """place -> the largest difference over the largest value; infinite where none was found."""
    differences = {}
    for place, theirs in expected.items():  # in the order of computation
        differences[place] = math.inf
        if place in found and found[place].shape == theirs.shape:
            largest = mx.abs(found[place] - theirs).max() / mx.abs(theirs).max()
            differences[place] = largest.item()
    return differences


def describe(place):
    layer, _, name = place.rpartition(".")
    return f"layer {layer}, {STAGES[name][0]}" if layer else STAGES[name][0]


def verdict(differences, bound):
    for place, difference in differences.items():
        if not difference <= bound:  # nor is NaN
            causes = STAGES[place.rpartition(".")[-1]][1]
            return f"The first beyond {bound:g}: {describe(place)}. Usual causes: {causes}."
    return f"All are within {bound:g}: the port computes what the original computes."


if __name__ == "__main__":
    llm.run(main)
