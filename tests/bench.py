#!/usr/bin/env python3
"""llm_inference against mlx-lm: one process, the very same weight arrays, alternating rounds.

Every ratio is mlx-lm's time (or memory) over ours, so above 1 ours is quicker (or smaller); it is the median of the
ratios of the rounds, in which the two take turns, so that whatever else the machine does hits both. A decode step is
timed in an endless greedy generation: with the next step queued, to the moment the token's id is known to Python.

    python tests/bench.py                      the miniature and a full-size random checkpoint (made here, 1.2 GB on disk)
    python tests/bench.py --model FOLDER       real weights; a quantized folder has the one type it was stored in
    python tests/bench.py --quick              short, with bounds: exit code 1 outside one of them, three times out of three
On Linux the float32 rows need LD_PRELOAD=/path/to/libopenblas.so.0, or both engines crawl in MLX's reference BLAS.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
try:
    from mlx_lm.generate import generate_step
except ImportError as error:
    sys.exit(f"bench.py compares with mlx-lm: pip install mlx-lm ({error})")
import checkpoints
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

import llm_inference

ROWS = (
    "cold",
    "prefill64",
    "prefill512",
    "decode16",
    "decode1k",
    "decode8k",
    "memory",
    "host",
    "end8k",
)
LABELS = {
    "cold": "whole process, to the last of 32 tokens",
    "memory": "peak memory, 512 tokens in, 32 out",
    "host": "building one decode step on the host (fused, as on a GPU)",
    "end8k": "decode step at the end of 8,192 tokens, and the first after 7,680 (both ours)",
    **{f"prefill{n}": f"prefill, {n} tokens" for n in (64, 512)},
    **{
        f"decode{n}": f"decode step, context {t}"
        for n, t in (("16", "16"), ("1k", "1,024"), ("8k", "8,192"))
    },
}
CONTEXT = {"decode16": 16, "decode1k": 1024, "decode8k": 8192}

# What each row should reach, (size or *, type or *): mlx-lm over ours. Times are noisy on shared cores, and another
# processor has other ratios: --quick fails for a time only below 0.7 of its target in three tries out of three. Memory
# does not fluctuate and is held to its bound. `end8k` is ours over ours and must stay below its bound: a cache that is
# copied, or grows, shows there as 2 and more.
TARGETS = {
    "cold": {("*", "*"): 10},
    "prefill64": {("full", "bfloat16"): 1.4, ("*", "*"): 1.0},
    "prefill512": {("*", "*"): 1.0},
    "decode16": {("full", "bfloat16"): 1.4, ("full", "4-bit"): 2.0, ("*", "*"): 1.0},
    "decode1k": {("*", "*"): 1.0},
    "decode8k": {("*", "*"): 1.0},
    "host": {("*", "*"): 0.9},
    "memory": {("*", "*"): 0.99},
    "end8k": {("*", "*"): 1.5},
}


def outside(row, ratio, target):
    """Whether a ratio is one that noise does not explain."""
    return (
        ratio > target if row == "end8k" else ratio < (target if row == "memory" else 0.7 * target)
    )


QUICK = {
    "mini": {"float32": ROWS, "bfloat16": ROWS[1:8], "4-bit": ROWS[1:8]},  # what --quick measures
    "full": {
        "float32": ("prefill64", "decode16", "memory", "host"),
        "bfloat16": ("prefill64", "decode16", "host"),
        "4-bit": ("decode16",),
    },
}

LONG = (
    ("full", "bfloat16", "prefill64"),
    ("full", "4-bit", "decode16"),
)  # a round takes 25 s and more


class Ours:
    """llm_inference behind the three calls that are measured. Caches hold `context` random rows: as dear as real ones."""

    def __init__(self, weights, config):
        self.weights, self.config = weights, config

    def cache(self, context, room):
        cache = llm_inference.make_cache(self.weights, self.config, context + room)
        for pair in cache:
            for array in pair:
                array[:, :context] = mx.random.normal(
                    (len(array), context, array.shape[-1])
                ).astype(array.dtype)
        mx.eval(cache)
        return cache

    def tokens(self, ids, cache=None, offset=0, count=10**9):
        """Ids without end (no stop ids), or `count` of them."""
        return llm_inference.generate(
            ids, self.weights, self.config, (), count, cache=cache, offset=offset
        )

    def graph(self, cache, context):
        """The logits of one decode step as a graph that nobody evaluates; a sliced cache keeps the cache itself as it is."""
        views, token = [(keys[:], values[:]) for keys, values in cache], mx.array([5])
        with mock.patch.multiple(
            llm_inference, ON_CPU=False, FUSED=True
        ):  # the graph that a GPU would get
            start = time.perf_counter()
            logits = llm_inference.forward(token, self.weights, self.config, views, context)
            return time.perf_counter() - start, logits

    def settle(self, cache):
        mx.eval(cache)


class Theirs:
    """mlx-lm, its model built from the same folder, then given our arrays: the weights are in memory once."""

    def __init__(self, folder, weights):
        self.model = load_model(Path(folder), lazy=True)[0]
        self.model.load_weights(list(weights.items()))
        self.shape, self.dtype = self.model.args, weights["model.norm.weight"].dtype

    def cache(self, context, _):  # it grows by itself, in steps of 256 tokens: while warming up
        cache = make_prompt_cache(self.model)
        for layer in cache:
            rows = lambda: mx.random.normal(
                (1, self.shape.num_key_value_heads, context, self.shape.head_dim)
            ).astype(self.dtype)
            layer.update_and_fetch(rows(), rows())
        self.settle(cache)
        return cache

    def tokens(self, ids, cache=None, offset=0, count=10**9):
        for layer in cache or ():
            layer.offset = offset
        return (
            token
            for token, _ in generate_step(
                mx.array(ids), self.model, max_tokens=count, prompt_cache=cache
            )
        )

    def graph(self, cache, context):
        views, token = make_prompt_cache(self.model), mx.array([[5]])
        for view, layer in zip(views, cache):
            view.keys, view.values, view.offset = layer.keys[:], layer.values[:], context
        start = time.perf_counter()
        logits = self.model(token, cache=views)
        return time.perf_counter() - start, logits

    def settle(self, cache):
        mx.eval([layer.state for layer in cache])


def prompt(length, vocab_size=2000):
    return [(37 * i + 11) % vocab_size for i in range(length)]


def prefill(engine, length):
    """Seconds from the prompt to the first token; the next step is already queued by then, in both engines."""
    start, tokens = time.perf_counter(), engine.tokens(prompt(length), count=2)
    next(tokens)
    seconds = time.perf_counter() - start
    list(tokens)  # what is still queued must not run into the next measurement
    mx.synchronize()
    return seconds


def decode(engine, cache, context, steps):
    """Seconds a step, over `steps` steps from `context` tokens on; the cache then counts as holding `context` again."""
    tokens = engine.tokens([5], cache, context, steps + 2)
    next(tokens)
    start = time.perf_counter()
    for _ in itertools.islice(tokens, steps):
        pass
    seconds = (time.perf_counter() - start) / steps
    list(tokens), engine.settle(cache)
    return seconds


def memory(engine):
    """Peak bytes over a prefill of 512 tokens and 32 more, weights included."""
    mx.synchronize(), mx.clear_cache(), mx.reset_peak_memory()
    for _ in engine.tokens(prompt(512), count=32):
        pass
    mx.synchronize()
    return mx.get_peak_memory()


def host(engine, cache, context, times):
    """Seconds to build one step's graph, the median of `times`; what was built is dropped off the clock."""
    return statistics.median(engine.graph(cache, context)[0] for _ in range(times))


def cold(folder, ours):
    """Seconds from the command to its end, 32 tokens later, as a user starts it (so nothing is preloaded)."""
    command = (
        [str(ROOT / "llm_inference.py"), "The capital of France is"]
        if ours
        else [
            "-m",
            "mlx_lm",
            "generate",
            "--prompt",
            "The capital of France is",
            "--ignore-chat-template",
            "--temp",
            "0",
        ]
    )
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *command, "--model", str(folder), "--max-tokens", "32"],
        check=True,
        cwd=ROOT,
        capture_output=True,
        env={key: value for key, value in os.environ.items() if key != "LD_PRELOAD"},
    )
    return time.perf_counter() - start


def alternate(rounds, ours, theirs, warm=True):
    """Both measured in turn, the order turning too -> (median ours, median theirs, median of theirs / ours)."""
    if warm:
        ours(), theirs()
    pairs = [(ours(), theirs()) if turn % 2 else (theirs(), ours())[::-1] for turn in range(rounds)]
    return tuple(map(statistics.median, (*zip(*pairs), [b / a for a, b in pairs])))


def measure(row, folder, ours, theirs, rounds, slow):
    """One row -> (ours, theirs, ratio); seconds, or bytes for memory. `slow`: a step takes long enough to time a few.

    For `end8k` it is our last step, our first one, last / first (medians of 32): what a growing or copied cache would cost.
    """
    steps = 5 if slow else 64
    if row == "cold":
        return alternate(rounds, lambda: cold(folder, True), lambda: cold(folder, False))
    if row == "memory":
        return alternate(1, lambda: memory(ours), lambda: memory(theirs), warm=False)
    if row.startswith("prefill"):
        length = int(row[7:])
        return alternate(
            rounds,
            lambda: prefill(ours, length),
            lambda: prefill(theirs, length),
            warm=not slow or length < 100,
        )
    if row == "end8k":
        cache, step = ours.cache(7680, 514), []
        tokens = ours.tokens([5], cache, 7680, 512)
        next(tokens)
        for _ in range(511):
            start = time.perf_counter()
            next(tokens)
            step.append(time.perf_counter() - start)
        first, last = statistics.median(step[:32]), statistics.median(step[-32:])
        return last, first, last / first
    context = CONTEXT.get(row, 16)
    caches = ours.cache(context, steps + 4), theirs.cache(context, steps + 4)
    if row == "host":
        return alternate(
            rounds,
            *(lambda e=e, c=c: host(e, c, context, 20) for e, c in zip((ours, theirs), caches)),
        )
    return alternate(
        rounds,
        *(lambda e=e, c=c: decode(e, c, context, steps) for e, c in zip((ours, theirs), caches)),
    )


def prepare(size, given, dtype, work):
    """-> the folder to measure: given, or made once under `work`; 4-bit ones are quantized from it as mlx-lm does."""
    base = Path(given) if given else checkpoints.MINI if size == "mini" else work / "full"
    if not (base / "config.json").exists():
        checkpoints.write_checkpoint(
            base,
            checkpoints.make_config(**checkpoints.FULL_SIZE, torch_dtype="bfloat16"),
            dtype=mx.bfloat16,
        )
    config = json.loads((base / "config.json").read_text())
    if dtype != "4-bit" or "quantization" in config:
        return base
    folder = work / f"{size}-4-bit"
    if not (folder / "config.json").exists():
        checkpoints.write_checkpoint(
            folder,
            *checkpoints.quantize(llm_inference.load(base)[0], config)[::-1],
            tokenizer_from=base,
        )
    return folder


def machine():
    cpu = (
        Path("/proc/cpuinfo")
        .read_text()
        .partition("model name")[2]
        .partition("\n")[0]
        .strip("\t :")
        if sys.platform == "linux"
        else subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True
        ).stdout.strip()
    )
    blas = ", OpenBLAS preloaded" if "openblas" in os.environ.get("LD_PRELOAD", "") else ""
    from importlib.metadata import version

    return (
        f"{platform.platform()}, {cpu or platform.processor()}, {os.cpu_count()} cores, device {mx.default_device().type.name}, "
        f"Python {platform.python_version()}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}{blas}"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder with real weights, instead of the two sizes")
    parser.add_argument("--size", choices=["mini", "full", "both"], default="both")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=["float32", "bfloat16", "4-bit"],
        default=["float32", "bfloat16", "4-bit"],
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument(
        "--rounds", type=int, help="alternating rounds a row (default 5; 3 with --quick)"
    )
    parser.add_argument("--keep", help="a folder to make the checkpoints in and find them again")
    parser.add_argument("--quick", action="store_true", help="a short form with bounds, for CI")
    args = parser.parse_args()
    sizes = ["model"] if args.model else ["mini", "full"] if args.size == "both" else [args.size]
    rounds, low = args.rounds or (3 if args.quick else 5), []
    print(
        machine(),
        "",
        "| size | type | | ours | mlx-lm | mlx-lm / ours | target |",
        "|---|---|---|---:|---:|---:|---:|",
        sep="\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(args.keep or temporary)
        for size, dtype in itertools.product(sizes, args.dtypes):
            allowed = QUICK.get(size, {}).get(dtype, ROWS) if args.quick else ROWS
            if not set(allowed) & set(args.rows):
                continue
            folder = prepare(size, args.model, dtype, work)
            stored = "quantization" in json.loads((folder / "config.json").read_text())
            if args.model and stored and dtype != args.dtypes[-1]:
                continue  # it has one type; once is enough
            weights, config, _ = llm_inference.load(folder, None if stored else getattr(mx, dtype))
            config["max_position_embeddings"] = (
                10**6
            )  # the miniature is measured past its own context
            ours, theirs, slow = (
                Ours(weights, config),
                Theirs(folder, weights),
                config["hidden_size"] >= 512,
            )
            first = dtype == args.dtypes[0]
            for row in [r for r in ROWS if r in args.rows and r in allowed]:
                if (
                    row == "cold"
                    and (size == "full" or not first)
                    or row == "end8k"
                    and (slow or not first)
                ):
                    continue
                target = next(
                    TARGETS[row][key] for key in [(size, dtype), ("*", "*")] if key in TARGETS[row]
                )
                turns = 1 if args.quick and (size, dtype, row) in LONG else rounds
                for _ in range(3 if args.quick and row != "memory" else 1):
                    a, b, ratio = measure(row, folder, ours, theirs, turns, slow)
                    unit = (
                        (lambda x: f"{x / 1e6:.1f} MB")
                        if row == "memory"
                        else (lambda x: f"{x * 1e3:.3g} ms" if x < 1 else f"{x:.2f} s")
                    )
                    print(
                        f"| {size} | {dtype} | {LABELS[row]} | {unit(a)} | {unit(b)} | {ratio:.2f} | {target} |",
                        flush=True,
                    )
                    if not outside(row, ratio, target):
                        break
                else:
                    if outside(row, ratio, target):
                        low.append(f"{size} {dtype} {row}: {ratio:.2f}, target {target}")
            del weights, ours, theirs
    if args.quick:
        sys.exit("outside its bound: " + "; ".join(low) if low else 0)


if __name__ == "__main__":
    main()
