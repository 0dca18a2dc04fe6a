"""How small can the weights become, and what does the model lose?

64 neighbours in a row of a matrix share a scale and a bias, and each becomes an integer of a few
bits: number = integer * scale + bias. With its part of scale and bias 4.5 bits stand for 16, and
each new token waits mostly for weights to come from memory. The price is measured: KL divergence
(how far the probabilities of the next token moved) and how often the first choice is the same.

    python -m examples.quantize tests/Qwen3-mini /tmp/Qwen3-mini-4bit --bits 4 --embed-bits 8
    python llm_inference.py --model /tmp/Qwen3-mini-4bit

mlx-lm runs the new folder, too. Paper: group-wise quantization, arXiv 2206.01861.
"""

import argparse
from pathlib import Path

import mlx.core as mx

import llm_inference as llm
from examples.check import load, tensor_shapes
from examples.checkpoint import folder_beside, write
from examples.common import encode

BITS = [2, 3, 4, 5, 6, 8]
TABLES = ("model.embed_tokens", "lm_head")  # only one where they are tied


def main():
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description="Write a model in a few bits a weight; measure the cost.",
        epilog="Example: python -m examples.quantize tests/Qwen3-mini /tmp/mini-4bit --bits 4",
    )
    flag = parser.add_argument
    flag("source", help="a folder with a dense Qwen3 that is not quantized")
    flag("target", type=Path, help="the folder to write, which does not exist yet")
    flag("--bits", type=int, choices=BITS, default=4, help="for each weight (4)")
    flag("--group-size", type=int, choices=[32, 64, 128], default=64, help="weights a scale (64)")
    flag("--embed-bits", type=int, choices=BITS, help="for embedding and head (as --bits)")
    flag("--text", type=Path, help="a file to measure on (200 tokens that SOURCE writes)")
    args = parser.parse_args()
    source = llm.find_model(args.source)
    with folder_beside(args.target) as folder:
        weights, config, tokenizer = load(source, lazy=True)
        packed, plan = quantize(weights, config, args.bits, args.group_size, args.embed_bits)
        if args.text:
            ids = encode(args.text.read_text("utf-8", "replace"), tokenizer)
        else:
            ids = encode("The capital of France is", tokenizer)
            ids += llm.generate(ids, weights, config, config["eos_token_id"], max_tokens=200)
        if not ids:
            parser.error(f"{args.text} is empty")
        ids = ids[: min(500, config["max_position_embeddings"])]
        before = log_probabilities(ids, weights, config)
        write(source, folder, packed, {"quantization": plan, "quantization_config": plan})
        smaller, new_config, _ = load(folder)  # a file that was cut would not load
        after = log_probabilities(ids, smaller, new_config)
    kl, agreement = cost(before, after)
    old_size = sum(array.nbytes for array in weights.values())
    new_size = sum(array.nbytes for array in smaller.values())
    print(f"{old_size:,} bytes became {new_size:,} ({new_size / old_size:.0%})", flush=True)
    print(
        f"over {len(ids)} tokens: mean KL {kl:.5f}, the same first choice {agreement:.1%}",
        flush=True,
    )


def quantize(weights, config, bits, group_size, embed_bits=None):
    """The weights with each matrix in three parts, and the plan for config.json. Nothing is
    computed yet: that happens as each file is written.
    """
    packed = dict(weights)
    plan = {"group_size": group_size, "bits": bits, "mode": "affine"}
    for name, shape in tensor_shapes(config).items():
        if f"{name}.scales" in weights:
            raise ValueError("the source is quantized already: take what it was made from")
        if len(shape) == 1:
            continue
        if shape[1] % group_size:
            raise ValueError(f"rows of {name} have {shape[1]} numbers: no groups of {group_size}")
        own_bits = embed_bits if embed_bits and name in TABLES else bits
        if own_bits != bits:  # mlx-lm reads it here; llm_inference.py sees it from the shapes
            plan[name] = {"group_size": group_size, "bits": own_bits}
        parts = mx.quantize(weights[f"{name}.weight"], group_size=group_size, bits=own_bits)
        packed |= zip((f"{name}.weight", f"{name}.scales", f"{name}.biases"), parts, strict=True)
    return packed, plan


def log_probabilities(ids, weights, config):  # (L,) -> (L, V)
    cache = llm.make_cache(weights, config, len(ids))
    rows = llm.hidden_states(ids, weights, config, cache, 0)
    logits = llm.head(rows, weights, config).astype(mx.float32)
    result = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(result)
    return result


def cost(before, after):  # (L, V), (L, V) -> mean KL divergence, share of equal first choices
    kl = mx.sum(mx.exp(before) * (before - after), axis=-1)
    same = mx.argmax(before, axis=-1) == mx.argmax(after, axis=-1)
    return mx.mean(kl).item(), mx.mean(same).item()


if __name__ == "__main__":
    llm.run(main)
