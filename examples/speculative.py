"""Can a model write several tokens in one step, without changing what it writes?

Scoring five rows costs little more than scoring one, since the weights are read once for all. So a
cheap draft guesses the next tokens, the model scores all guesses in one pass, and those that it
would have written itself stay; the first other one is replaced by its own choice. What the rejected
ones left in the cache is written over.

    python -m examples.speculative --max-tokens 60

Drafts: what followed the last tokens earlier in the text (prompt lookup), or with --draft FOLDER a
smaller model. Papers: arXiv 2211.17192, 2302.01318
"""

import random
import time

import mlx.core as mx

import llm_inference as llm
from examples.check import load
from examples.common import encode
from examples.drafts import Lookup, Model, draw, finite, probabilities
from examples.sequence import Sequence

CITIES = "The capital of Italy is Rome. The capital of Germany is Berlin. The capital of Spain is"


def speculate(
    prompt, weights, config, stop, draft, guesses=4, max_tokens=100, seed=None, **sampling
):
    """Yield the ids of each step, which together are what generate yields; 1 to guesses + 1."""
    text = Sequence(prompt, config, max_tokens)
    if text.error:
        raise ValueError(text.error)
    while text.read(llm.CHUNK, weights, config):
        continue
    text.make_room(weights, config)
    rng = random.Random(seed)
    ids = list(prompt)
    while len(ids) <= text.limit:
        proposed = draft.propose(ids, min(guesses, text.limit - len(ids)), rng)
        rows = ids[-1:] + [guess for guess, _ in proposed]
        offset = len(ids) - 1  # back over all that was rejected
        llm.grow_cache(text.cache, offset + len(rows), text.limit)
        x = llm.hidden_states(rows, weights, config, text.cache, offset)
        logits = finite(llm.head(x, weights, config))
        written = []
        for row, (guess, q) in enumerate(proposed):
            written.append(judge(guess, probabilities(logits[row], **sampling), q, rng))
            if written[-1] != guess:
                break  # the rows after it follow a text that is not written
        else:  # all agreed: the last row's choice comes as a gift
            written.append(draw(probabilities(logits[-1], **sampling), rng))
        if proposed:
            draft.learn(len(written) - 1)
        ids += written
        ends = [place for place, token_id in enumerate(written) if token_id in stop]
        if ends:
            yield written[: ends[0]]
            return
        yield written


def judge(guess, p, q, rng):
    """The guess, drawn from q, or another id: in all, an id drawn from p."""
    if q is None:
        q = (mx.arange(len(p)) == guess).astype(p.dtype)
    if rng.random() < (p[guess] / q[guess]).item():
        return guess
    return draw(mx.maximum(p - q, 0), rng)  # ids that q proposes less often than p wants


def main():
    parser = llm.argument_parser(
        "Continue a text, several tokens a step. "
        "Example: python -m examples.speculative --max-tokens 60"
    )
    usual = f"{CITIES} Madrid. {CITIES}"
    parser.add_argument("prompt", nargs="*", default=[usual], help="(a text that repeats itself)")
    parser.add_argument("--draft", metavar="FOLDER", help="a smaller model that guesses")
    parser.add_argument("--guesses", type=llm.ranged(int, 1, 64), default=4, help="(%(default)s)")
    args = parser.parse_intermixed_args()
    prompt = " ".join(args.prompt)
    weights, config, tokenizer = llm.load_model(args)
    stop = config["eos_token_id"]
    flags = llm.options(args)
    sampling = {name: flags[name] for name in ("temperature", "top_p", "top_k")}
    draft = Lookup()
    if args.draft:
        dtype = getattr(mx, args.dtype) if args.dtype else None
        draft_weights, draft_config, own = load(llm.find_model(args.draft), dtype)
        same = own.get_vocab() == tokenizer.get_vocab()
        if not same or draft_config["vocab_size"] != config["vocab_size"]:
            raise ValueError(f"{args.draft} has another vocabulary: its ids mean other texts")
        draft = Model(draft_weights, draft_config, sampling)
    ids = encode(prompt, tokenizer)
    print(prompt, end="", flush=True)
    start = time.perf_counter()
    steps = speculate(ids, weights, config, stop, draft, args.guesses, **flags)
    sizes = []
    answer = []
    llm.stream(counted(steps, sizes), tokenizer, answer)
    rate = len(answer) / (time.perf_counter() - start)
    start = time.perf_counter()
    single = list(llm.generate(ids, weights, config, stop, **flags))
    single_rate = len(single) / (time.perf_counter() - start)
    llm.note(
        f"{len(answer)} tokens in {len(sizes)} steps, {len(answer) / max(len(sizes), 1):.2f} a step"
    )
    llm.note(f"Time: {rate:.1f} tokens/s, reading included; generate: {single_rate:.1f}")


def counted(steps, sizes):
    """The ids of all steps, one by one; the number of each step's goes to `sizes`."""
    for written in steps:
        sizes.append(len(written))
        yield from written


if __name__ == "__main__":
    llm.run(main)
