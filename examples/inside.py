"""Which numbers inside the model are worth a look?

Here they are computed for explore.py, by the functions of llm_inference.py: what the head makes of
the residual stream after each layer (logit lens), the attention weights of a head, what the filters
leave of the next token's distribution. A text is fed once; each step feeds one token more.

Imported by explore.py. Logit lens: nostalgebraist (2020), lesswrong.com/posts/AcKRB8wDpdaN6v6ru
"""

import random
import secrets
import threading

import mlx.core as mx

import llm_inference as llm
from examples.common import encode
from examples.sequence import choose

PROMPT_LIMIT = 200  # tokens of a prompt
STEP_LIMIT = 200  # tokens that may follow it
TEXTS = 16  # so many are kept; the one that was used first goes first
GUESSES = 3  # of each layer at each position
CANDIDATES = 12  # for the next token
NOT_FINITE = "the logits are not finite: damaged weights, or a dtype too narrow"


class Text:
    """What is known of the text in one tab of a browser."""

    def __init__(self, ids, cache, seed):
        self.ids = []
        self.waiting = ids  # to be fed
        self.cache = cache
        self.limit = len(ids) + STEP_LIMIT
        self.streams = []  # the residual stream before each layer, (S, D)
        self.logits = None  # for the next token
        self.rng = random.Random(seed)


class Explorer:
    """The model, and the texts of all tabs by name. `lock` lets one request compute at a time."""

    def __init__(self, name, weights, config, tokenizer, seed=None):
        self.name = name
        self.model = weights, config
        self.tokenizer = tokenizer
        self.seed = seed
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.texts = {}
        self.lock = threading.Lock()
        self.added = set(tokenizer.get_added_tokens_decoder())

    def begin(self, prompt):
        """The name of a new text, which is not read yet."""
        ids = encode(prompt, self.tokenizer)
        limit = min(PROMPT_LIMIT, self.model[1]["max_position_embeddings"])
        if not 0 < len(ids) <= limit:
            raise ValueError(f"the prompt has {len(ids)} tokens; 1 to {limit} can be shown")
        name = secrets.token_hex(8)
        with self.lock:
            self.texts[name] = Text(ids, llm.make_cache(*self.model, 0), self.seed)
            while len(self.texts) > TEXTS:
                self.texts.pop(next(iter(self.texts)))
        return name

    def find(self, name):
        if name not in self.texts:
            raise ValueError("this text is no longer kept: read it again")
        if self.texts[name].waiting:
            raise ValueError("this text is still being read")
        return self.texts[name]

    def feed(self, text):
        """Read what waits, and nothing else. After each layer, yield its guesses at each token."""
        ids = text.waiting
        offset = len(text.ids)
        llm.grow_cache(text.cache, offset + len(ids), text.limit)
        x = llm.embed(ids, *self.model)
        for layer in range(self.layers):
            before = text.streams[layer : layer + 1]
            text.streams[layer : layer + 1] = [mx.concatenate([*before, x])]
            x = llm.transformer_block(x, *self.model, layer, text.cache, offset)
            logits = llm.head(x, *self.model)
            mx.eval(logits, text.streams[layer], text.cache[layer])  # the next thread goes on
            yield self.guesses(logits)
        text.logits = logits[-1]
        mx.eval(text.logits)
        text.ids = text.ids + ids
        text.waiting = []

    def guesses(self, logits):  # (L, V)
        """For each row the likeliest tokens with their shares, the first one first."""
        if not mx.isfinite(logits).all():
            raise ValueError(NOT_FINITE)
        shares = mx.softmax(logits.astype(mx.float32), axis=-1)
        best = mx.argpartition(-shares, kth=GUESSES - 1, axis=-1)[:, :GUESSES]
        best_shares = mx.take_along_axis(shares, best, axis=-1)
        rows = []
        for ids, row in zip(best.tolist(), best_shares.tolist(), strict=True):
            pairs = sorted(zip(row, ids, strict=True), reverse=True)
            rows.append([self.token(token_id) | {"share": share} for share, token_id in pairs])
        return rows

    def token(self, token_id):
        """Its id and text. A part of a character has no text of its own: its bytes are shown."""
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        if "\ufffd" in text and token_id not in self.added:
            letters = self.tokenizer.id_to_token(token_id)
            text = "⟨" + " ".join(f"{BYTES[letter]:02X}" for letter in letters) + "⟩"
        return {"id": token_id, "text": text}

    def attention(self, question):
        """For each token, what it takes from all tokens, in one head: rows of shares."""
        text = self.find(question.text)
        if question.layer >= self.layers or question.head >= self.heads:
            raise ValueError(f"layers are 0 to {self.layers - 1}, heads 0 to {self.heads - 1}")
        weights, config = self.model
        norm = weights[f"model.layers.{question.layer}.input_layernorm.weight"]
        x = llm.rms_norm(text.streams[question.layer], norm, config["rms_norm_eps"])
        q, _, _ = llm.queries_keys_values(x, *self.model, question.layer, 0)
        keys, _ = text.cache[question.layer]
        taken = llm.attention_weights(q, keys[:, : len(text.ids)])
        return taken[question.head].astype(mx.float32).tolist()

    def next(self, question):
        """The likeliest next tokens: their shares at this temperature, and what the filters leave
        of them. The file's own filters decide.
        """
        logits = self.find(question.text).logits.astype(mx.float32)
        greedy = question.temperature < 1e-5  # then sample takes the likeliest
        heated = logits if greedy else logits / question.temperature
        kept = llm.filter_logits(heated, question.top_p, 1 if greedy else question.top_k)
        shares = mx.softmax(heated)
        left = mx.softmax(kept)
        candidates = []
        for token_id in mx.argsort(-logits)[:CANDIDATES].tolist():
            both = {"share": shares[token_id].item(), "left": left[token_id].item()}
            candidates.append(self.token(token_id) | both)
        survivors = mx.isfinite(kept).sum().item()
        return {"candidates": candidates, "survivors": survivors, "vocabulary": len(logits)}

    def step(self, question):
        """Draw a token and read it: its guesses, layer by layer."""
        text = self.find(question.text)
        if len(text.ids) >= min(text.limit, self.model[1]["max_position_embeddings"]):
            raise ValueError(f"the text is full: it has {len(text.ids)} tokens")
        token_id = choose(text.logits, text.rng, question.flags()).item()
        if token_id in self.model[1]["eos_token_id"]:
            return {"end": self.token(token_id)}
        text.waiting = [token_id]
        return {"token": self.token(token_id), "guesses": [rows[0] for rows in self.feed(text)]}


def byte_letters():
    """Such tokenizers write each byte as a letter: printable ones as they are, others from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = byte_letters()
