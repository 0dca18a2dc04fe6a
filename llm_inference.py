#!/usr/bin/env python3
"""What happens between a prompt and its answer inside a large language model: Qwen3, on MLX,
an array library like NumPy that uses GPUs.

    text -> token ids -> embedding -> N layers of (attention, feed-forward) -> scores -> sampling
                ^                                                                           |
                +-------------- the chosen id is printed as text, and fed next -------------+

A token is a piece of text, a word or a part of one; its id is its number in the vocabulary.
Sizes have one letter each, here with their values in Qwen3-0.6B:
    L  tokens fed in this pass: the whole prompt, then one at a time
    S  tokens so far, those L included    up to 40,960
    N  layers                             28
    D  hidden size: numbers per token     1,024
    F  feed-forward size                  3,072
    V  vocabulary: tokens there are       151,936
    H  query heads (section 5)            16
    K  key/value heads                    8
    d  numbers per head (head_dim)        128
MLX is lazy: an operation only notes what is to be computed, and mx.eval computes it.
bfloat16, the number type of the published weights, has 8 significant bits; float32 has 24.
MLX has some steps as a fused kernel, one GPU program for the whole step; a GPU uses those.
Sources: Qwen3 (arXiv 2505.09388), RMSNorm (1910.07467), RoPE (2104.09864), grouped-query attention
(2305.13245), SwiGLU (2002.05202), top-p (1904.09751).
"""

import argparse
import json
import os
import random
import re
import sys
import time
from pathlib import Path

try:
    import mlx.core as mx
    import tokenizers
except ImportError as error:
    sys.exit(f"llm_inference.py: {error}; pip install -r requirements.txt (a Mac: arm64 Python)")

ON_CPU = mx.default_device().type == mx.cpu
FUSED = not ON_CPU  # False: the steps run as written here; True: as fused kernels. Tests do both.
CHUNK = 128 if ON_CPU else 512  # prompt tokens in one pass; a longer prompt is fed in chunks
SECOND_THREAD = mx.new_thread_local_stream(mx.cpu)  # for product_on_cpu, which may be skipped


# ---- 1. Checkpoint: a folder goes in; weights, config and tokenizer come out.
def load(folder, dtype=None, lazy=False, stretched_rope=False):
    """weights (one flat dict: published name -> array), config (config.json) and tokenizer.

    dtype, such as mx.float32, converts the weights; lazy leaves them on disk until they are used;
    stretched_rope allows a RoPE (section 4) that is altered for longer texts; nothing in this file
    uses it. ValueError: what cannot be run.
    """
    folder = Path(folder)
    config = read_config(folder, stretched_rope)
    weights = read_weights(folder, tensor_shapes(config))
    dtype = dtype or matrix(weights, "model.embed_tokens")[-1].dtype  # the last part is no integer
    for name, part in weights.items():  # one type: one float32 weight would widen every result
        if mx.issubdtype(part.dtype, mx.floating):
            weights[name] = part.astype(dtype)
    if not lazy:
        mx.eval(weights)  # here they are read from disk
    tokenizer = read(folder / "tokenizer.json", tokenizers.Tokenizer.from_file)
    tokenizer.no_truncation()  # some files carry settings of their training
    tokenizer.no_padding()
    ends = []  # ids or texts of tokens that end an answer; the files do not agree, so take all
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = read(folder / file) if (folder / file).exists() else {}
        for end in (content.get("eos_token_id"), content.get("eos_token")):
            ends += end if isinstance(end, list) else [end]
    ids = {tokenizer.token_to_id(end) if isinstance(end, str) else end for end in ends}
    return weights, config | {"eos_token_id": sorted(ids - {None})}, tokenizer


def tensor_shapes(config):
    """Name (without .weight at its end) -> shape of all tensors. This table is the architecture."""
    D = config["hidden_size"]
    F = config["intermediate_size"]
    d = config["head_dim"]
    queries = config["num_attention_heads"] * d  # H * d; in the 0.6B twice D
    keys = config["num_key_value_heads"] * d  # K * d
    shapes = {"model.embed_tokens": (config["vocab_size"], D)}  # a row for each token
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        shapes[f"{block}.input_layernorm"] = (D,)  # RMSNorm (section 3) before attention
        shapes[f"{block}.self_attn.q_proj"] = (queries, D)  # to queries
        shapes[f"{block}.self_attn.k_proj"] = (keys, D)  # to keys
        shapes[f"{block}.self_attn.v_proj"] = (keys, D)  # to values
        shapes[f"{block}.self_attn.q_norm"] = (d,)  # RMSNorm of a query
        shapes[f"{block}.self_attn.k_norm"] = (d,)  # RMSNorm of a key
        shapes[f"{block}.self_attn.o_proj"] = (D, queries)  # from all heads back to D
        shapes[f"{block}.post_attention_layernorm"] = (D,)  # RMSNorm before feed-forward
        shapes[f"{block}.mlp.gate_proj"] = (F, D)  # the gate of section 6
        shapes[f"{block}.mlp.up_proj"] = (F, D)  # what the gate lets through
        shapes[f"{block}.mlp.down_proj"] = (D, F)  # back to D
    shapes["model.norm"] = (D,)  # RMSNorm before the head
    if not config["tie_word_embeddings"]:  # where tied, the embedding serves here, too
        shapes["lm_head"] = (config["vocab_size"], D)  # the last product: a score per token
    return shapes


def matrix(weights, name):
    """[W]; or [packed, scales, biases] of a matrix that is quantized, a few bits for each number:
    number = integer * scale + bias, with one scale and one bias for each group of neighbours.
    """
    parts = [f"{name}.weight", f"{name}.scales", f"{name}.biases"]
    return [weights[part] for part in parts if part in weights]


def unpack(stored, width):
    """The numbers of a stored matrix, or of some of its rows."""
    W, *quantized = stored
    if not quantized:
        return W
    return mx.dequantize(W, *quantized, **packing(W, quantized[0], width))


def packing(packed, scales, width):
    """Both follow from the shapes: a row has one scale a group, and is packed in 32-bit words."""
    return {"group_size": width // scales.shape[-1], "bits": packed.shape[-1] * 32 // width}


def read_config(folder, stretched_rope):
    """config.json, nested parts lifted to the top, if it asks for nothing that is not here."""
    config = {"tie_word_embeddings": False} | read(folder / "config.json")
    for part in ("rope_scaling", "rope_parameters", "quantization", "quantization_config"):
        config = (config.get(part) or {}) | config  # a key at the top wins
    only = {"model_type": "qwen3", "hidden_act": "silu", "quant_method": None, "mode": "affine"}
    only |= {"attention_bias": False, "use_sliding_window": False}
    only |= {} if stretched_rope else {"rope_type": "default", "type": "default"}
    refused = {key: config[key] for key in only if config.get(key) not in (None, only[key])}
    sizes = "num_hidden_layers hidden_size intermediate_size vocab_size num_attention_heads "
    sizes += "num_key_value_heads max_position_embeddings rope_theta rms_norm_eps"
    for key in sizes.split():
        if not isinstance(config.get(key), int | float):
            refused[key] = config.get(key)
    if refused:
        raise ValueError(f"{folder}/config.json has {refused}: only dense Qwen3 can be run")
    d = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config | {"head_dim": d}


def read_weights(folder, shapes):
    """The tensors of all files, not read from disk yet. All after `found = {}` only checks them."""
    index = folder / "model.safetensors.index.json"
    place = read(index)["weight_map"] if index.exists() else {}
    files = sorted({folder / file for file in place.values()}) or [folder / "model.safetensors"]
    if not all(file.exists() for file in files):  # an index may be left over from other files
        files = sorted(folder.glob("model*.safetensors")) or files
    weights = {}
    origin = {}
    for file in files:
        tensors = read(file, mx.load)
        for name in tensors.keys() & weights.keys():
            raise ValueError(f"{name} is both in {origin[name]} and in {file}: remove one of them")
        weights |= tensors
        origin |= dict.fromkeys(tensors, file)
    if "lm_head" not in shapes:  # the 0.6B's file holds one all the same
        weights = {name: weights[name] for name in weights if not name.startswith("lm_head.")}
    found = {}  # name -> shape, or what is wrong
    for name in weights:
        stem = re.sub(r"\.(weight|scales|biases)$", "", name)
        try:  # lazily: of a quantized matrix only shape and type are computed
            W = unpack(matrix(weights, stem), shapes[stem][-1])
            found[stem] = W.shape if mx.issubdtype(W.dtype, mx.floating) else W.dtype
        except (KeyError, TypeError, ValueError) as error:
            found[stem] = f"stored in an unknown way ({error})" if stem in shapes else "unknown"
    odd = [name for name in shapes | found if found.get(name) != shapes.get(name)]
    if odd:
        for name in odd[:3]:
            found.setdefault(name, f"missing {place.get(f'{name}.weight', '')}".strip())
        first = "; ".join(f"{name} is {found[name]}, not {shapes.get(name)}" for name in odd[:3])
        raise ValueError(f"{folder}: {len(odd)} tensors do not fit config.json: {first}")
    return weights


def read(path, parse=None):
    if not path.is_file():
        parts = "config.json, tokenizer.json and model.safetensors"
        way = "in the repository, python -m examples.download NAME gets one of huggingface.co"
        raise ValueError(f"{path} is missing: a model is a folder with {parts} (no GGUF); {way}")
    if b"git-lfs" in path.open("rb").read(40):
        raise ValueError(f"{path} is a Git LFS pointer; git lfs pull gets the file")
    try:
        return parse(str(path)) if parse else dict(json.loads(path.read_bytes()))
    except Exception as error:
        # With these words MLX and tokenizers report a file that is intact, but of an unknown kind.
        unknown_kind = re.search("unsupported|untagged|missing", str(error))
        what = "cannot be read" if unknown_kind else "is incomplete or damaged, download it again"
        raise ValueError(f"{path} {what} ({error})") from None


# ---- 2. Embedding and matrix products: token ids go in, one row of D numbers for each comes out.
def embed(token_ids, weights, config):  # (L,) -> (L, D)
    """Token i is row i of a table. (A quantized table has three parts.)"""
    rows = [part[mx.array(token_ids)] for part in matrix(weights, "model.embed_tokens")]
    return unpack(rows, config["hidden_size"])


def linear(x, weights, name):  # (L, in) -> (L, out)
    """y = x W^T, with W stored as (out, in). Nearly all weights, and nearly all time, are here."""
    return (product_on_cpu if ON_CPU else product)(x, *matrix(weights, name))


def product(x, W, *quantized):
    if not quantized:
        return x @ W.T
    return mx.quantized_matmul(x, W, *quantized, **packing(W, quantized[0], x.shape[-1]))


def product_on_cpu(x, W, *quantized):
    """Skip this: the same as product, quicker on a CPU. Quantized matrices are multiplied in
    float32, those of 16 bits in two halves, one for each thread.
    """
    if quantized:
        return product(x.astype(mx.float32), W, *quantized).astype(x.dtype)
    if W.dtype == mx.float32 or W.size < 2**20:
        return product(x, W)
    upper, lower = mx.split(W, [len(W) // 2])
    second = mx.matmul(x, lower.T, stream=SECOND_THREAD)
    return mx.concatenate([x @ upper.T, second], axis=-1)


# ---- 3. RMSNorm: rows go in; the same rows, each scaled to a common size, come out.
def rms_norm(x, weight, eps):  # (..., D) -> (..., D)
    """x / sqrt(mean(x^2) + eps) * weight: keeps the numbers in one range through all layers."""
    if not FUSED:
        x32 = x.astype(mx.float32)  # a sum of a thousand squares needs more than 8 bits
        mean_square = mx.mean(x32 * x32, axis=-1, keepdims=True)
        return weight * (x32 * mx.rsqrt(mean_square + eps)).astype(x.dtype)
    return mx.fast.rms_norm(x, weight, eps)


# ---- 4. RoPE: queries or keys, the rows that section 5 compares by products, go in; they come out
# rotated by their positions. Two rows rotated alike have the same product as before, so only the
# difference of their positions counts. Quick pairs tell neighbours apart, slow ones near from far.
def apply_rope(x, offset, theta):  # (heads, L, d) -> (heads, L, d)
    """Rotate each pair (x[j], x[j + d/2]) of the row at position p by p * theta^(-2j/d) radians.

    Row i stands at position offset + i. theta comes with the model: 1,000,000. (For examples with
    B texts at once: x may be (B, heads, L, d), and offset an array of B numbers.)
    """
    L, d = x.shape[-2:]
    if not FUSED:
        position = mx.array(offset)[..., None, None] + mx.arange(L)  # offset, offset + 1, ...
        frequency = theta ** (-mx.arange(0, d, 2, dtype=mx.float32) / d)
        # Angles (1, L, d/2) are float32: bfloat16 would round position 257 to 256.
        angle = position[..., None] * frequency
        cos = mx.cos(angle).astype(x.dtype)
        sin = mx.sin(angle).astype(x.dtype)
        a, b = mx.split(x, 2, axis=-1)  # the pairs (x[j], x[j + d/2]), as in training
        return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return mx.fast.rope(x, d, traditional=False, base=theta, scale=1.0, offset=offset)


# ---- 5. Attention: each token's row goes in; what it gathers from all tokens so far comes out.
# From its row each token makes a query (what it looks for), a key (what it offers) and a value
# (what it hands over). It does so in several heads, each with d numbers of its own, so that it can
# look for several things at once. The keys and values of earlier tokens wait in the cache, which
# section 8 makes.
def attention(x, weights, config, layer, cache, offset):  # (L, D) -> (L, D)
    """For L rows, the first at position `offset`, after `offset` rows in the cache."""
    q, k, v = queries_keys_values(x, weights, config, layer, offset)
    keys, values = cache[layer]  # (K, size, d) each, with room for `size` tokens
    end = offset + len(x)
    keys[:, offset:end] = k  # written into the cache itself: the past is never copied
    values[:, offset:end] = v
    mixed = dot_product_attention(q, keys[:, :end], values[:, :end]).swapaxes(0, 1)  # (L, H, d)
    return linear(mixed.reshape(len(x), -1), weights, f"model.layers.{layer}.self_attn.o_proj")


def queries_keys_values(x, weights, config, layer, offset):
    """(L, D) -> (H, L, d), (K, L, d), (K, L, d). Three products are cut into heads. Then each query
    and key is brought to a common length (QK-norm) and rotated.
    """
    name = f"model.layers.{layer}.self_attn"
    q = split_heads(linear(x, weights, f"{name}.q_proj"), config)
    k = split_heads(linear(x, weights, f"{name}.k_proj"), config)
    v = split_heads(linear(x, weights, f"{name}.v_proj"), config)
    q = rms_norm(q, weights[f"{name}.q_norm.weight"], config["rms_norm_eps"])
    k = rms_norm(k, weights[f"{name}.k_norm.weight"], config["rms_norm_eps"])
    # Joined along the heads (axis -3) and rotated in one call: the angles are computed once.
    turned = apply_rope(mx.concatenate([q, k], axis=-3), offset, config["rope_theta"])
    q, k = mx.split(turned, [q.shape[-3]], axis=-3)
    return q, k, v


def split_heads(x, config):  # (L, heads * d) -> (L, heads, d) -> (heads, L, d)
    return x.reshape(*x.shape[:-1], -1, config["head_dim"]).swapaxes(-3, -2)


def dot_product_attention(q, k, v):  # (H, L, d), (K, S, d), (K, S, d) -> (H, L, d)
    """For each query the weighted mean of the values; the next function computes the weights."""
    if not FUSED:
        return mix_values(attention_weights(q, k), v)
    attend = mx.fast.scaled_dot_product_attention
    return attend(q[None], k[None], v[None], scale=q.shape[-1] ** -0.5, mask="causal")[0]


def attention_weights(q, k):  # (H, L, d), (K, S, d) -> (H, L, S)
    """softmax(q k^T / sqrt(d)): how much each of the last L tokens takes from each of all S.

    softmax is exp(x) / sum(exp(x)): positive, and 1 in sum. sqrt(d) keeps the range the same
    for any d.
    """
    H, L, d = q.shape
    K, S, _ = k.shape
    # H / K neighbouring query heads share a key head: of 16 and 8, heads 0 and 1 share key head 0.
    # Their queries are stacked into one matrix, since each row of a product comes from one row.
    grouped = q.reshape(K, (H // K) * L, d)
    scores = (grouped @ k.swapaxes(1, 2)).reshape(H, L, S).astype(mx.float32) * d**-0.5
    # Causal mask: row i is the token at position S - L + i, and sees none after it. With 3 in the
    # cache and 2 new tokens, position 3 sees 1 1 1 1 0, and position 4 sees 1 1 1 1 1.
    visible = mx.arange(S) <= mx.arange(S - L, S)[:, None]  # (L, S)
    return mx.softmax(mx.where(visible, scores, -mx.inf), axis=-1).astype(q.dtype)


def mix_values(p, v):  # (H, L, S), (K, S, d) -> (H, L, d)
    grouped = p.reshape(len(v), -1, p.shape[-1])  # (K, (H // K) * L, S), stacked as before
    return (grouped @ v).reshape(*p.shape[:2], -1)


# ---- 6. SwiGLU: each token's row goes in; what this layer adds to it comes out.
def ffn(x, weights, layer):  # (L, D) -> (L, F) -> (L, D)
    """The feed-forward step: down(silu(gate(x)) * up(x)), with silu(z) = z * sigmoid(z).

    sigmoid(z) = 1 / (1 + exp(-z)) goes from 0 to 1. So silu(z) is nearly z where z is large and
    nearly 0 where it is far below 0: gate scales up, or shuts it off.
    """
    name = f"model.layers.{layer}.mlp"
    gate = linear(x, weights, f"{name}.gate_proj")
    up = linear(x, weights, f"{name}.up_proj")
    return linear(gate * mx.sigmoid(gate) * up, weights, f"{name}.down_proj")


# ---- 7. Transformer block: the rows (the residual stream) go in; the same rows, plus two
# contributions, come out.
def transformer_block(x, weights, config, layer, cache, offset):  # (L, D) -> (L, D)
    """x += attention(rms_norm(x)), then x += ffn(rms_norm(x))."""
    name = f"model.layers.{layer}"
    eps = config["rms_norm_eps"]
    normed = rms_norm(x, weights[f"{name}.input_layernorm.weight"], eps)
    x = x + attention(normed, weights, config, layer, cache, offset)
    normed = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
    return x + ffn(normed, weights, layer)


# ---- 8. The whole model: token ids go in; a score (logit) for every possible next token comes out.
def forward(token_ids, weights, config, cache, offset):  # (L,) -> (V,)
    """Logits for the next token, from the last row. The first of token_ids stands at `offset`."""
    return head(hidden_states(token_ids, weights, config, cache, offset)[-1:], weights, config)[0]


def hidden_states(token_ids, weights, config, cache, offset):  # (L,) -> (L, D)
    x = embed(token_ids, weights, config)
    for layer in range(config["num_hidden_layers"]):
        x = transformer_block(x, weights, config, layer, cache, offset)
    return x


def head(x, weights, config):  # (L, D) -> (L, V)
    """A last RMSNorm, then each row's products with V rows of weights, one for each token."""
    x = rms_norm(x, weights["model.norm.weight"], config["rms_norm_eps"])
    # Where the two are tied, the rows of the embedding serve here, too.
    return linear(x, weights, "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head")


def make_cache(weights, config, size):
    """Room for the keys and values of `size` tokens: a pair per layer, each (K, size, d)."""
    shape = (config["num_key_value_heads"], size, config["head_dim"])
    dtype = weights["model.norm.weight"].dtype
    layers = range(config["num_hidden_layers"])
    cache = [(mx.zeros(shape, dtype), mx.zeros(shape, dtype)) for _ in layers]
    mx.eval(cache)
    return cache


def grow_cache(cache, needed, limit):
    """If `needed` tokens do not fit: room for a quarter more, 256 at least, up to `limit`."""
    size = cache[-1][0].shape[1]  # the last layer grows last: if it has room, all have
    if needed <= size:
        return
    more = min(max(size // 4, 256, needed - size), limit - size)
    for layer in range(len(cache)):  # layer by layer, to spare memory
        cache[layer] = [mx.pad(rows, [(0, 0), (0, more), (0, 0)]) for rows in cache[layer]]
        mx.eval(cache[layer])


# ---- 9. Sampling: logits go in; one token id comes out.
def sample(logits, temperature=0.0, top_p=1.0, top_k=0, key=None):  # (V,) -> ()
    """The likeliest token at temperature 0, else a draw from softmax(logits / temperature),
    filtered: the higher the temperature, the more surprising. The same key (a random number's seed,
    of mx.random.key) gives the same draw, in any thread.
    """
    if temperature < 1e-5:
        return mx.argmax(logits)
    logits = logits.astype(mx.float32) / temperature  # bfloat16 loses sums of small numbers
    kept = filter_logits(logits, top_p, top_k) if top_p < 1 or top_k > 0 else logits
    return mx.random.categorical(kept, key=key)  # takes the softmax itself


def filter_logits(logits, top_p=1.0, top_k=0):  # (V,) -> (V,)
    """Keep the top_k likeliest tokens (0: all) and, of these, the fewest whose probabilities reach
    top_p. All others get minus infinity; the likeliest always stays.
    """
    count = top_k if 0 < top_k < len(logits) else len(logits)
    best = mx.argpartition(-logits, kth=count - 1)[:count]  # in any order: quicker than sorting all
    best = best[mx.argsort(-logits[best])]  # likeliest first
    before = mx.cumsum(mx.softmax(logits[best]), inclusive=False)  # the sum of all likelier ones
    keep = (before < max(top_p, 1e-9)) | (top_p >= 1)  # top_p 0 keeps the likeliest, 1 all
    kept = mx.where(keep, logits[best], -mx.inf)
    return mx.put_along_axis(mx.full(logits.shape, -mx.inf), best, kept, axis=0)


# ---- 10. Generation: prompt ids go in; the ids of the answer come out, one by one. In principle:
#     while True:  # ids is the prompt at first
#         token_id = sample(forward(ids, weights, config, cache, offset))
#         if token_id in stop:
#             return
#         yield token_id
#         offset += len(ids)
#         ids = [token_id]
def generate(ids, weights, config, stop, max_tokens=100, seed=None, cache=None, offset=0, **draw):
    """Yield ids until one is in `stop` (it is not yielded) or max_tokens or the context is used up.

    draw: temperature, top_p and top_k, for sample. A seed gives the same ids again. A given cache,
    a list that grows as needed, holds `offset` tokens. ValueError: bad ids, no room, not finite.
    """
    ids = [int(token_id) for token_id in ids]
    end = offset + len(ids)
    # At most so many tokens are fed, the prompt included; the answer's last one never is.
    limit = min(end + max_tokens - 1, config["max_position_embeddings"])
    if not ids or end > limit or min(ids) < 0 or max(ids) >= config["vocab_size"]:
        raise ValueError(f"{end} prompt tokens: 1 to {limit} that the vocabulary has can be fed")
    cache = cache or make_cache(weights, config, 0)  # empty; the next line makes room
    grow_cache(cache, end, limit)
    for start in range(0, len(ids), CHUNK):
        logits = forward(ids[start : start + CHUNK], weights, config, cache, offset + start)
        mx.eval(cache)  # MLX is lazy: only the last chunk's logits, used below, are ever computed
    rng = random.Random(seed)  # without a seed, different each time
    next_token = choose(logits, rng, draw)
    # The device never waits for Python: the next step is queued before a token is read. Where that
    # token turns out to be the last, the queued step was computed for nothing.
    for position in range(end, limit + 1):
        token = next_token  # it stands at `position`
        if position < limit:
            grow_cache(cache, position + 1, limit)
            next_token = choose(forward(token[None], weights, config, cache, position), rng, draw)
        token_id = token.item()
        if token_id < 0:  # choose says so
            raise ValueError("the logits are not finite: damaged weights, or a dtype too narrow")
        if token_id in stop:
            return
        yield token_id


def choose(logits, rng, draw):
    """Sample, or -1 where a logit is not finite. Starts the computation, and does not wait."""
    token = sample(logits, key=mx.random.key(rng.getrandbits(64)), **draw)
    token = mx.where(mx.isfinite(logits).all(), token, mx.array(-1))
    mx.async_eval(token)
    return token


# ---- 11. Command line: arguments go in; the answer goes to stdout, all around it to stderr.
def main():
    usual = "The capital of France is"
    parser = argument_parser("Continue a text with Qwen3.", f'python llm_inference.py "{usual}"')
    parser.add_argument("prompt", nargs="*", default=[usual], help=f'"{usual}"; - reads stdin')
    args = parser.parse_intermixed_args()
    prompt = " ".join(args.prompt)
    if prompt == "-":
        prompt = read_stdin()
    if not prompt.strip():
        parser.error("the prompt is empty")
    weights, config, tokenizer = load_model(args)
    ids = encode(prompt, tokenizer)
    note(f"Prompt: {prompt}\n{'-' * 60}\nOutput: ", end="")
    print(prompt, end="", flush=True)
    start = time.perf_counter()
    tokens = generate(ids, weights, config, config["eos_token_id"], **options(args))
    count = stream(tokens, tokenizer, [])
    seconds = time.perf_counter() - start
    if count == min(args.max_tokens, config["max_position_embeddings"] - len(ids) + 1):
        note("(cut: --max-tokens or the context is used up)")
    peak = mx.get_peak_memory() / 1e9
    note(
        f"Time: {seconds:.2f}s ({len(ids)} tokens read, {count} written, peak memory {peak:.2g} GB)"
    )


def argument_parser(description, example):
    """The flags that all programs here share; a wrong one is one line on stderr, exit code 2."""
    parser = argparse.ArgumentParser(prog=Path(sys.argv[0]).name, usage=argparse.SUPPRESS)
    parser.description = f"{description} The answer goes to stdout. Example: {example}"
    flag = parser.add_argument
    flag("--model", help="a folder with a dense Qwen3 (Qwen3-0.6B, else the bundled miniature)")
    flag("--max-tokens", type=number(int, 1), default=100, help="stop after N tokens (%(default)s)")
    flag("--temperature", type=number(float), default=0.0, help="0: only the best (%(default)s)")
    flag("--top-k", type=number(int), default=0, help="among K likeliest, 0: all (%(default)s)")
    flag("--top-p", type=number(float, 0, 1), default=1.0, help="the fewest that reach P (1.0)")
    flag("--seed", type=number(int), help="a number that makes the draws repeatable")
    flag("--dtype", choices=["float32", "bfloat16", "float16"], help="compute in this type instead")
    return parser


def number(kind, low=0, high=2**63):
    def parse(text):
        if low <= kind(text) <= high:
            return kind(text)
        raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")

    parse.__name__ = "number"
    return parse


def options(args):  # the flags that generate takes
    names = ("max_tokens", "seed", "temperature", "top_p", "top_k")
    return {name: vars(args)[name] for name in names}


def load_model(args):
    """Find, load and announce what --model and --dtype ask for."""
    folder = find_model(args.model).resolve()
    weights, config, tokenizer = load(folder, args.dtype and getattr(mx, args.dtype))
    sizes = f"{config['num_hidden_layers']} layers, {config['hidden_size']} dim"
    heads = f"{config['num_attention_heads']} Q heads, {config['num_key_value_heads']} KV heads"
    note(f"Model: {model_name(folder)} ({sizes}, {heads})")
    return weights, config, tokenizer


def model_name(folder):
    if folder.parent.name == "snapshots":  # in the hub's cache the name stands two folders above
        return folder.parents[1].name.removeprefix("models--").replace("--", "/")
    return folder.name


def find_model(name=None):
    """The folder named; without a name Qwen3-0.6B beside this file, else the bundled miniature."""
    here = Path(__file__).resolve().parent
    folder = Path(name).expanduser() if name else here / "Qwen3-0.6B"
    bundled = here / "tests/Qwen3-mini"
    if name or any(folder.glob("model*.safetensors")) or not bundled.is_dir():
        return folder
    note("The bundled miniature answers; python -m examples.download gets Qwen3-0.6B (1.5 GB).")
    return bundled


def read_stdin():  # a byte-order mark and the last line ends are no part of the text
    text = sys.stdin.buffer.read().decode("utf-8-sig", "replace")
    return text.replace("\r\n", "\n").rstrip("\r\n")


def encode(text, tokenizer):  # bytes that are not UTF-8 become the replacement character
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return tokenizer.encode(text, add_special_tokens=False).ids


def stream(token_ids, tokenizer, answer):
    """Print characters as soon as they are whole, collect the ids in `answer`, return their number.

    A character may be spread over several tokens. What is held back is printed in any case.
    """
    decoder = tokenizers.decoders.DecodeStream(skip_special_tokens=False)
    printed = 0
    try:
        for token_id in token_ids:
            answer.append(token_id)
            printed += sys.stdout.write(decoder.step(tokenizer, token_id) or "")
            sys.stdout.flush()
    finally:
        print(tokenizer.decode(answer, skip_special_tokens=False)[printed:], flush=True)
    return len(answer)


def note(text, end="\n"):
    print(text, end=end, file=sys.stderr, flush=True)


def run(program):
    """Run a main function. An error is one line on stderr and exit code 1; Ctrl-C is 130."""
    status = 0
    try:
        sys.stdout.reconfigure(errors="replace")
        program()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        if not isinstance(error, BrokenPipeError):  # a reader that left is no error
            note(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}")
            status = 1
    os._exit(status)  # without closing stdout, since a full disk would complain again


if __name__ == "__main__":
    run(main)
