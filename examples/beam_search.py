"""What if the likeliest token now leads to an unlikely sentence?

Greedy decoding never takes a step back. Beam search keeps the B likeliest beginnings (beams) side
by side: each step scores every continuation of every beam, and the B best live on. A beam that ends
is set aside with its score, the sum of its log probabilities / length ^ penalty, until no living
beam seems able to beat the B best of these.

    python -m examples.beam_search "The capital of France is" --beams 4

Paper: arXiv 1609.08144, section 7; penalty and ending as transformers has them
"""

import mlx.core as mx

import llm_inference as llm
from examples.batch import batch_step
from examples.common import encode
from examples.sequence import Sequence

DRAWS = ("temperature", "top_k", "top_p", "seed")


class Beam:
    """Ids, the sum of their log probabilities, and a cache that lacks only the last of them."""

    def __init__(self, ids, total, cache):
        self.ids = ids
        self.total = total
        self.cache = cache


def beam_search(prompt, weights, config, stop, beams=4, max_tokens=100, length_penalty=1.0):
    """Up to `beams` pairs (score, ids), the best first. A `stop` id counts as the last of them."""
    start = Sequence(prompt, config, max_tokens)
    if start.error:
        raise ValueError(start.error)
    while start.read(llm.CHUNK, weights, config):
        continue
    start.make_room(weights, config)
    running = [Beam(start.pending, 0.0, start.cache)]  # the prompt's last token is fed as a row
    ended = []
    for position in range(start.offset, start.limit):
        for beam in running:
            llm.grow_cache(beam.cache, position + 1, start.limit)
        scored = continuations(running, weights, config, position, beams * (1 + len(stop)))
        divisor = (position + 1 - start.offset) ** length_penalty
        parents = running
        running = []
        taken = set()
        for rank, (total, parent, token_id) in enumerate(scored):
            ids = parents[parent].ids + [token_id]
            if token_id in stop or position + 1 == start.limit:
                if rank < beams:  # one that ends must be among the best, too
                    ended.append((total / divisor, ids[1:]))
            elif len(running) < beams:
                cache = parents[parent].cache  # the first child inherits it
                running.append(Beam(ids, total, copy(cache) if parent in taken else cache))
                taken.add(parent)
        ended.sort(key=lambda pair: -pair[0])
        ended = ended[:beams]
        # Totals only fall. A longer beam is divided by more, so this may stop too early.
        if running and len(ended) == beams and running[0].total / divisor <= ended[-1][0]:
            break
    return ended


def continuations(running, weights, config, position, count):
    """The `count` likeliest (total, number of the beam, token id), the best first."""
    tokens = [beam.ids[-1] for beam in running]
    caches = [beam.cache for beam in running]
    logits = batch_step(tokens, weights, config, caches, [position] * len(running))
    logits = logits.astype(mx.float32)
    if not mx.isfinite(logits).all():
        raise ValueError("the logits are not finite: damaged weights, or a dtype too narrow")
    log_p = logits - mx.logsumexp(logits, axis=-1, keepdims=True)  # (B, V)
    totals = (log_p + mx.array([[beam.total] for beam in running])).flatten()
    count = min(count, totals.size)
    best = mx.argpartition(-totals, kth=count - 1)[:count]
    best = best[mx.argsort(-totals[best])]
    scored = zip(totals[best].tolist(), best.tolist(), strict=True)
    return [(total, *divmod(index, config["vocab_size"])) for total, index in scored]


def copy(cache):
    """Arrays of its own: writing into a second name of the same one would change the first's."""
    return [[mx.array(keys), mx.array(values)] for keys, values in cache]


def main():
    usual = "The capital of France is"
    parser = llm.argument_parser(
        "Find likely continuations of a text. "
        f'Example: python -m examples.beam_search "{usual}" --beams 4'
    )
    parser.set_defaults(max_tokens=20)
    parser.add_argument("prompt", nargs="*", default=[usual], help=f'"{usual}"')
    parser.add_argument("--beams", type=llm.ranged(int, 1, 1000), default=4, help="(%(default)s)")
    parser.add_argument(
        "--length-penalty",
        type=llm.ranged(float, -10, 10),
        default=1.0,
        help="more favours longer texts (%(default)s)",
    )
    args = parser.parse_intermixed_args()
    if any(getattr(args, name) != parser.get_default(name) for name in DRAWS):
        parser.error("beam search draws nothing: no --temperature, --top-k, --top-p or --seed")
    prompt = " ".join(args.prompt)
    weights, config, tokenizer = llm.load_model(args)
    ids = encode(prompt, tokenizer)
    for beams in (1, args.beams):
        found = beam_search(
            ids,
            weights,
            config,
            config["eos_token_id"],
            beams=beams,
            max_tokens=args.max_tokens,
            length_penalty=args.length_penalty,
        )
        print(f"{beams} beam{'s'[: beams - 1]}, score and text:")
        for score, answer in found:
            text = prompt + tokenizer.decode(answer, skip_special_tokens=False)
            print(f"{score:9.4f}  {text}".replace("\n", "\\n"), flush=True)


if __name__ == "__main__":
    llm.run(main)
