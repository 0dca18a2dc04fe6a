"""How can one model answer many people at once?

A step is slow because every weight is read from memory, and one row or eight of them cost nearly
the same. So the rows of several texts go through each matrix together; only attention works text by
text, since each has a past, and a cache, of its own. A text that ends leaves its slot to the next
one at once (continuous batching), so that no row of a step is idle.

    python -m examples.batch examples/prompts.txt --slots 4

Paper: Orca, OSDI 2022 (usenix.org/conference/osdi22/presentation/yu)
"""

import codecs
import collections
import sys
import time
from pathlib import Path

import mlx.core as mx

import llm_inference as llm
from examples.common import encode
from examples.sequence import Sequence, choose

PROMPTS = Path(__file__).with_name("prompts.txt")
one_text = llm.attention


def batch_step(token_ids, weights, config, caches, offsets):  # B ids -> (B, V)
    """Row b feeds token_ids[b], at position offsets[b] of the text whose past is in caches[b]."""
    x = llm.hidden_states(token_ids, weights, config, caches, list(offsets))
    return llm.head(x, weights, config)


def attention(x, weights, config, layer, cache, offset):  # (B, D) -> (B, D)
    """The file's attention, or, where `offset` is a list, one row for each of B texts."""
    if not isinstance(offset, list):
        return one_text(x, weights, config, layer, cache, offset)
    offsets = mx.array(offset)
    if not llm.FUSED:  # there they are added to positions (B, 1, L); the kernel takes (B,)
        offsets = offsets[:, None, None]
    q, k, v = llm.queries_keys_values(x[:, None], weights, config, layer, offsets)
    mixed = []
    for row, position in enumerate(offset):
        keys, values = cache[row][layer]
        end = position + 1
        keys[:, position:end] = k[row]
        values[:, position:end] = v[row]
        mixed.append(llm.dot_product_attention(q[row], keys[:, :end], values[:, :end]))
    mixed = mx.stack(mixed).reshape(len(x), -1)  # (B, H, 1, d) -> (B, H * d)
    return llm.linear(mixed, weights, f"model.layers.{layer}.self_attn.o_proj")


llm.attention = attention  # the file looks the name up at each call, and finds this one


def advance(sequences, weights, config, stop):
    """One step: prompts are read a little further, all others get a token; these are returned."""
    running = [sequence for sequence in sequences if not sequence.ended]
    room = llm.CHUNK  # a long prompt is read over several steps: nobody waits for all of it
    for sequence in running:
        room -= sequence.read(room, weights, config)
    ready = [sequence for sequence in running if len(sequence.pending) == 1]
    if not ready:
        return []  # all are still being read
    for sequence in ready:
        sequence.make_room(weights, config)
    tokens = [sequence.pending[0] for sequence in ready]
    caches = [sequence.cache for sequence in ready]
    offsets = [sequence.offset for sequence in ready]
    logits = batch_step(tokens, weights, config, caches, offsets)
    chosen = []
    for sequence, row in zip(ready, logits, strict=True):
        chosen.append(choose(row, sequence.rng, sequence.draw))
    for sequence, token in zip(ready, chosen, strict=True):
        sequence.accept(token.item(), stop)
    return ready


def answer_all(sequences, slots, weights, config, stop):
    """Yield the sequences in their order, each as soon as it has ended."""
    waiting = collections.deque(sequence for sequence in sequences if not sequence.ended)
    running = []
    for sequence in sequences:
        while not sequence.ended:
            while waiting and len(running) < slots:
                running.append(waiting.popleft())
            advance(running, weights, config, stop)
            for other in running:
                other.cache = None if other.ended else other.cache  # memory for the next one
            running = [other for other in running if not other.ended]
        yield sequence


def main():
    parser = llm.argument_parser(
        "Continue each line of a file, several at once. "
        "Example: python -m examples.batch examples/prompts.txt --slots 4"
    )
    parser.set_defaults(max_tokens=30)
    parser.add_argument("prompts", nargs="?", default=PROMPTS, help="a file; - reads stdin")
    parser.add_argument("--slots", type=llm.ranged(int, 1), default=8, help="at once (%(default)s)")
    args = parser.parse_args()
    source = sys.stdin.buffer.read() if args.prompts == "-" else Path(args.prompts).read_bytes()
    source = source.removeprefix(codecs.BOM_UTF8)  # Windows editors write one
    lines = [line.decode("utf-8", "replace") for line in source.splitlines()]
    weights, config, tokenizer = llm.load_model(args)
    stop = config["eos_token_id"]
    sequences = [Sequence(encode(line, tokenizer), config, **llm.options(args)) for line in lines]
    start = time.perf_counter()
    ended = answer_all(sequences, args.slots, weights, config, stop)
    for number, sequence in enumerate(ended):
        text = lines[number] + tokenizer.decode(sequence.answer, skip_special_tokens=False)
        print(text.replace("\n", "\\n"), flush=True)
        if sequence.error:
            llm.note(f"(line {number + 1}: {sequence.error})")
    seconds = time.perf_counter() - start
    rate = sum(len(sequence.answer) for sequence in sequences) / seconds
    good = [sequence.prompt for sequence in sequences if not sequence.error]
    start = time.perf_counter()
    single = [
        list(llm.generate(ids, weights, config, stop, **llm.options(args))) for ids in good[:2]
    ]
    single_rate = sum(map(len, single)) / (time.perf_counter() - start)
    rates = f"{rate:.1f} tokens/s; the first two by generate: {single_rate:.1f}"
    llm.note(f"Time: {seconds:.2f}s ({args.slots} slots: {rates})")
    if len(good) < len(sequences):
        raise ValueError(f"{len(sequences) - len(good)} of {len(sequences)} lines failed")


if __name__ == "__main__":
    llm.run(main)
