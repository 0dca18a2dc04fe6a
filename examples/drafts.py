"""Who guesses the next tokens, so that the model only has to check them?

Two ways for speculative.py: copy what followed when the last tokens stood in the text before (it
costs nothing, and helps where texts quote, list or edit), or ask a smaller model. Each is an object
with `propose` and `learn`; a guess may be as wrong as it likes, for the model has the last word.
"""

import mlx.core as mx

import llm_inference as llm
from examples.sequence import Sequence

NGRAM = 3  # the last tokens, which must have stood before


class Lookup:
    """Guesses that the text goes on as it did after the latest earlier place of its last tokens."""

    def __init__(self):
        self.after = {}  # n-gram -> where the text went on after it
        self.known = NGRAM  # the n-grams before this place are in `after`
        self.failures = 0  # in a row
        self.pause = 0  # steps without a guess

    def propose(self, ids, count, rng):
        """Up to `count` pairs: an id, the probabilities it was drawn with (None: it was not)."""
        for place in range(self.known, len(ids)):
            self.after[tuple(ids[place - NGRAM : place])] = place
        self.known = max(NGRAM, len(ids))
        if self.pause > 0:
            self.pause -= 1
            return []
        start = self.after.get(tuple(ids[-NGRAM:]), len(ids))
        return [(guess, None) for guess in ids[start : start + count]]

    def learn(self, agreed):
        """A wrong guess costs time, so each failure in a row doubles the pause."""
        self.failures = 0 if agreed else self.failures + 1
        self.pause = 2 ** min(self.failures, 6) if self.failures else 0


class Model:
    """Guesses what a smaller model would write."""

    def __init__(self, weights, config, sampling):
        self.weights = weights
        self.config = config
        self.sampling = sampling
        self.cache = llm.make_cache(weights, config, 0)
        self.fed = []  # the ids in the cache

    def propose(self, ids, count, rng):
        while self.fed != ids[:-1][: len(self.fed)]:
            self.fed.pop()  # a rejected guess
        fed = len(self.fed)
        text = Sequence(ids[fed:], self.config, max_tokens=10**9, cache=self.cache, offset=fed)
        while not text.ended and text.read(llm.CHUNK, self.weights, self.config):
            continue
        proposed = []
        while len(proposed) < count and not text.ended:  # it ends where the context is used up
            text.make_room(self.weights, self.config)
            logits = llm.forward(text.pending, self.weights, self.config, self.cache, text.offset)
            q = probabilities(finite(logits), **self.sampling)
            guess = draw(q, rng)
            proposed.append((guess, q))
            text.accept(guess, stop=())
        self.fed = (ids + text.answer)[: text.offset]
        return proposed

    def learn(self, agreed):
        pass


def probabilities(logits, temperature=0.0, top_p=1.0, top_k=0):  # (V,) -> (V,)
    """What the file's `sample` draws from."""
    if temperature < 1e-5:
        return (mx.arange(len(logits)) == mx.argmax(logits)).astype(mx.float32)
    logits = logits.astype(mx.float32) / temperature
    return mx.softmax(llm.filter_logits(logits, top_p, top_k) if top_p < 1 or top_k else logits)


def finite(logits):
    if not mx.isfinite(logits).all():
        raise ValueError("the logits are not finite: damaged weights, or a dtype too narrow")
    return logits


def draw(p, rng):
    key = mx.random.key(rng.getrandbits(64))
    return mx.random.categorical(mx.log(p), key=key).item()
