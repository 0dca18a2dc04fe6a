"""What has to be remembered of a text between two steps?

`generate` keeps it in variables of its own. Where many texts go on in turn (batch.py), or one text
in several ways (beam_search.py, speculative.py), it has to lie somewhere: here.
"""

import random

import mlx.core as mx

import llm_inference as llm


def choose(logits, rng, draw):
    """Sample as generate does, or -1 where a logit is not finite. Starts the computation, and does
    not wait for it.
    """
    token = llm.sample(logits, key=mx.random.key(rng.getrandbits(64)), **draw)
    token = mx.where(mx.isfinite(logits).all(), token, mx.array(-1))
    mx.async_eval(token)
    return token


class Sequence:
    """A prompt and its answer so far: what generate keeps in its variables, and as it counts them.

    draw: temperature, top_p and top_k. A given cache holds `offset` tokens. A prompt that cannot be
    fed has ended, with an error.
    """

    def __init__(self, ids, config, max_tokens=100, seed=None, cache=None, offset=0, **draw):
        end = offset + len(ids)
        self.limit = min(end + max_tokens - 1, config["max_position_embeddings"])
        self.prompt = list(ids)
        self.pending = self.prompt  # still to be fed
        self.cache = cache
        self.offset = offset  # tokens in the cache
        self.rng = random.Random(seed)
        self.draw = draw
        self.answer = []
        self.ended = ""  # later "stop", "length" or "error"
        self.error = ""
        if not ids or end > self.limit or min(ids) < 0 or max(ids) >= config["vocab_size"]:
            self.ended = "error"
            needed = f"1 to {self.limit} ids of the vocabulary"
            self.error = f"the prompt ends at {end}: it needs {needed}"

    def make_room(self, weights, config):
        self.cache = self.cache or llm.make_cache(weights, config, 0)
        llm.grow_cache(self.cache, self.offset + len(self.pending), self.limit)

    def read(self, count, weights, config):
        """Feed up to `count` ids of the prompt, but its last, for what they leave in the cache."""
        part = self.pending[:-1][:count]
        if part:
            self.make_room(weights, config)
            llm.hidden_states(part, weights, config, self.cache, self.offset)
            mx.eval(self.cache)
            self.offset += len(part)
            self.pending = self.pending[len(part) :]
        return len(part)

    def accept(self, token_id, stop):
        """After the row of the last pending token, which gave token_id."""
        self.offset += 1
        if token_id < 0:
            self.ended = "error"
            self.error = "the logits are not finite: damaged weights, or a dtype too narrow"
        elif token_id in stop:
            self.ended = "stop"
        else:
            self.answer.append(token_id)
            self.pending = [token_id]
            self.ended = "length" if self.offset == self.limit else ""
