"""How does a model learn something new without new copies of its matrices?

LoRA leaves each matrix W (out, in) as it is and adds a product of two thin ones beside it, A
(in, r) and B (r, out): y = x W^T + scale * x A B. Only A and B are trained, a few percent of all
numbers. What is not repeated is forgotten: --rehearse mixes in text that the model knows.

    python -m examples.lora --data examples/lora_facts.jsonl --rehearse examples/lora_rehearse.jsonl
        --test examples/lora_questions.jsonl examples/lora_capitals.jsonl --layers 4 --steps 120
        --rate 1e-3 --out /tmp/adapters --fuse /tmp/Qwen3-mini-lora             (all in one line)

examples/training_data.py says what a file may hold. The adapters are as mlx-lm writes them, for its
--adapter-path. Paper: LoRA, arXiv 2106.09685.
"""

import argparse
import itertools
import json
import math
import random
from pathlib import Path

import mlx.core as mx
from mlx import nn, optimizers
from tqdm import tqdm

import llm_inference as llm
from examples.adapters import PLACES, fuse, make_adapters, with_adapters
from examples.check import load
from examples.checkpoint import folder_beside, write
from examples.training_data import read_records


def main():
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description="Fine-tune a model with LoRA.",
        epilog="Example: python -m examples.lora --data examples/lora_facts.jsonl --out /tmp/new",
    )
    flag = parser.add_argument
    flag("--model", help="a folder with a dense Qwen3, quantized or not (the bundled miniature)")
    flag("--data", type=Path, required=True, help="what to learn, a JSON object a line")
    flag("--out", type=Path, required=True, help="a new folder for the adapters")
    flag("--rehearse", type=Path, help="known text to mix in, three records for each new one")
    flag("--test", type=Path, nargs="*", default=[], help="files only asked, before and after")
    flag("--fuse", type=Path, help="a new folder for the model with the adapters added in")
    flag("--rank", type=llm.ranged(int, 1), default=8, help="r (%(default)s)")
    flag("--scale", type=llm.ranged(float), default=20.0, help="on what is added (%(default)s)")
    flag("--layers", type=llm.ranged(int, 1), default=999, help="only the last N layers (all)")
    beside = f"beside which matrices: {PLACES[0]}, {PLACES[-1]}, ... (all seven)"
    flag("--places", nargs="+", choices=PLACES, default=PLACES, metavar="NAME", help=beside)
    flag(
        "--steps",
        type=llm.ranged(int, 1),
        default=200,
        help="updates of the adapters (%(default)s)",
    )
    flag("--batch", type=llm.ranged(int, 1), default=2, help="new records a step (%(default)s)")
    flag(
        "--rate",
        type=llm.ranged(float),
        default=1e-4,
        help="of learning (1e-4; the miniature: 1e-3)",
    )
    flag("--seed", type=llm.ranged(int), default=0, help="for A and the order (%(default)s)")
    flag("--dtype", choices=["float32", "bfloat16", "float16"], help="compute in this type instead")
    args = parser.parse_args()
    for target in (args.out, args.fuse):
        if target and (target.exists() or not target.absolute().parent.is_dir()):
            parser.error(f"{target} must be a new folder in one that exists")
    folder = llm.find_model(args.model)
    weights, config, tokenizer = load(folder, args.dtype and getattr(mx, args.dtype))
    if args.fuse and any(name.endswith(".scales") for name in weights):
        parser.error("--fuse: a quantized matrix would round what is added; --out alone works")
    records = {}  # path -> its records; without --rehearse a path is None, and has none
    for path in [args.data, args.rehearse, *args.test]:
        records[path] = read_records(path, folder, config, tokenizer) if path else []
    llm.linear = with_adapters(llm.linear, args.scale)
    layers = min(args.layers, config["num_hidden_layers"])
    adapters = make_adapters(config, args.rank, layers, args.places, args.seed)
    before = {path: score(records[path], weights, config) for path in records}
    known = records[args.rehearse]
    adapters = train(adapters, weights, config, records[args.data], known, args)
    for path in filter(None, records):
        after = score(records[path], weights | adapters, config)
        print(
            f"{path}: {before[path]} right before, {after} after, of {len(records[path])}",
            flush=True,
        )
    with folder_beside(args.out) as out:
        form = {"rank": args.rank, "scale": args.scale, "dropout": 0.0, "keys": args.places}
        settings = {"fine_tune_type": "lora", "num_layers": layers, "lora_parameters": form}
        mx.save_safetensors(str(out / "adapters.safetensors"), adapters)
        (out / "adapter_config.json").write_text(json.dumps(settings, indent=1))
    if args.fuse:
        with folder_beside(args.fuse) as out:
            write(folder, out, fuse(weights, adapters, args.scale), {})


def answer_logits(ids, start, weights, config):  # -> (tokens from start on, V)
    cache = llm.make_cache(weights, config, len(ids) - 1)
    rows = llm.hidden_states(ids[:-1], weights, config, cache, 0)
    return llm.head(rows[start - 1 :], weights, config)  # row i says what comes at i + 1


def loss(adapters, batch, weights, config):
    """Mean of -log(probability) of the tokens to learn. mx.value_and_grad takes the gradient of the
    first argument: the adapters, and no others.
    """
    total = 0
    for ids, start in batch:
        logits = answer_logits(ids, start, weights | adapters, config).astype(mx.float32)
        total += nn.losses.cross_entropy(logits, mx.array(ids[start:]), reduction="mean")
    return total / len(batch)


def train(adapters, weights, config, new, known, args):
    rng = random.Random(args.seed)
    new = rounds(new, rng)
    known = rounds(known, rng)
    rate = optimizers.linear_schedule(args.rate, 0.0, args.steps)
    optimizer = optimizers.AdamW(learning_rate=rate, weight_decay=0.0)
    loss_and_gradient = mx.value_and_grad(loss)
    bar = tqdm(range(args.steps), unit="step")
    for step in bar:
        batch = list(itertools.islice(new, args.batch))
        batch += itertools.islice(known, 3 * args.batch)
        value, gradient = loss_and_gradient(adapters, batch, weights, config)
        adapters = optimizer.apply_gradients(gradient, adapters)
        mx.eval(adapters, optimizer.state)
        if not math.isfinite(value.item()):
            raise ValueError(f"the loss is not finite at step {step}: a lower --rate may help")
        bar.set_postfix(loss=f"{value.item():.3f}")
    return adapters


def rounds(records, rng):
    """All records in random order, again and again; nothing where there are none."""
    while records:
        yield from rng.sample(records, len(records))


def score(records, weights, config):
    """How many answers come out right, token for token, if each likeliest token is taken."""
    right = 0
    for ids, start in records:
        choices = mx.argmax(answer_logits(ids, start, weights, config), axis=-1)
        right += choices.tolist() == ids[start:]
    return right


if __name__ == "__main__":
    llm.run(main)
