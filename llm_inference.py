"""What happens between a prompt and its answer inside a large language model: Qwen3 (arXiv
2505.09388), on MLX, an array library like NumPy that uses GPUs.

    text -> token ids -> embedding -> N layers of (attention, feed-forward) -> scores -> sampling
                ^                                                                           |
                +-------------- the chosen id is printed as text, and fed next -------------+

A token is a piece of text, a word or a part of one; its id is its number in the vocabulary.
Sizes have one letter each, here with their values in Qwen3-0.6B:
    L  tokens fed in this pass: the prompt (in chunks, if long), then one at a time
    S  tokens so far, those L included    up to 40,960
    N  layers                             28
    D  hidden size: numbers per token     1,024
    F  feed-forward size                  3,072
    V  vocabulary: tokens there are       151,936
    H  query heads (section 5)            16
    K  key/value heads                    8
    d  numbers per head (head_dim)        128
MLX is lazy: an operation only notes what to compute; mx.eval, mx.async_eval and item compute it.
bfloat16, the number type of the published weights, has 8 significant bits; float32 has 24.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

try:
    import mlx.core as mx
    import tokenizers
except ImportError as error:
    sys.exit(f"llm_inference.py: {error}; pip install -r requirements.txt (a Mac: arm64 Python)")

ON_CPU = mx.default_device().type == mx.cpu
FUSED = not ON_CPU  # on a GPU MLX has some steps as fused kernels, one program for the whole step
CHUNK = 128 if ON_CPU else 512  # prompt tokens in a pass; more come in chunks, to spare memory
SECOND_THREAD = mx.new_thread_local_stream(mx.cpu)  # for product_on_cpu, which you may skip


# ---- 1. Checkpoint: a folder goes in; weights, config and tokenizer come out. The embedding is a
# table (V, D), and each of the N layers has seven matrices: q_proj (H * d, D), k_proj and v_proj
# (K * d, D), o_proj (D, H * d), gate_proj and up_proj (F, D), down_proj (D, F), and norm vectors.
def load(folder, dtype=None, lazy=False, stretched_rope=False):
    """weights (published name -> array), config and tokenizer. dtype (say mx.float32) converts. For
    examples/: lazy leaves the weights on disk, stretched_rope accepts altered RoPE (section 4)."""
    folder = Path(folder)
    config = read_config(folder, stretched_rope)
    weights = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights |= mx.load(str(file))
    if config["tie_word_embeddings"]:  # then the embedding also serves as lm_head, in section 8
        weights = {name: weights[name] for name in weights if not name.startswith("lm_head.")}
    float_part = weights.get("model.embed_tokens.scales", weights["model.embed_tokens.weight"])
    for name, array in weights.items():  # all in the embedding's type (see `matrix` for scales)
        if mx.issubdtype(array.dtype, mx.floating) and not name.endswith(".bias"):
            weights[name] = array.astype(dtype or float_part.dtype)  # one float32 would widen all
        elif array.dtype != mx.uint32:  # so a .bias is refused; uint32 (quantized) is kept as is
            raise ValueError(f"{name} is a bias, or {array.dtype}: Qwen3 has no such tensor")
    mx.eval([] if lazy else weights)  # here they are read from disk
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()  # some files carry settings of their training
    tokenizer.no_padding()
    ends = []  # ids or texts of tokens that end an answer; the files do not agree, so take all
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((folder / file).read_bytes()) if (folder / file).exists() else {}
        for end in (content.get("eos_token_id"), content.get("eos_token")):
            ends += end if isinstance(end, list) else [end]
    ids = {tokenizer.token_to_id(end) if isinstance(end, str) else end for end in ends}
    return weights, config | {"eos_token_id": sorted(ids - {None})}, tokenizer


def read_config(folder, stretched_rope):
    """config.json, nested parts lifted to the top. ValueError: it asks for what is not here."""
    config = {"tie_word_embeddings": False} | json.loads((folder / "config.json").read_bytes())
    for part in ("rope_scaling", "rope_parameters", "quantization", "quantization_config"):
        config = (config.get(part) or {}) | config  # a key at the top wins
    only = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False}
    only |= {"use_sliding_window": False, "quant_method": None, "mode": "affine"}  # or none
    only |= {} if stretched_rope else {"rope_type": "default", "type": "default"}
    refused = {key: config[key] for key in only if config.get(key) not in (None, only[key])}
    if refused:
        raise ValueError(f"config.json has {refused}: only dense Qwen3 can be run")
    d = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config | {"head_dim": d}


def matrix(weights, name, width):
    """W, of `width` columns, and {}; or, if quantized, W packed and what it takes to unpack it."""
    W = weights[f"{name}.weight"]
    if f"{name}.scales" not in weights:  # not quantized; else affine: integer * scale + bias
        return W, {}
    packing = {part: weights[f"{name}.{part}"] for part in ("scales", "biases")}
    packing["bits"] = W.shape[-1] * 32 // width  # a row is packed in words of 32 bits
    packing["group_size"] = width // packing["scales"].shape[-1]  # neighbours share scale and bias
    return W, packing


# ---- 2. Embedding and matrix products: token ids go in, one row of D numbers for each comes out.
def embed(token_ids, weights, config):  # (L,) -> (L, D)
    """Token i is row i of a table (if quantized, of its three parts)."""
    parts = {name: weights[name][mx.array(token_ids)] for name in weights if "embed_tokens" in name}
    W, packing = matrix(parts, "model.embed_tokens", config["hidden_size"])
    return mx.dequantize(W, **packing) if packing else W


def linear(x, weights, name):  # (L, in) -> (L, out)
    """y = x W^T, W stored as (out, in). Most weights are here, and most time while S is small."""
    W, packing = matrix(weights, name, x.shape[-1])
    if not ON_CPU:
        return mx.quantized_matmul(x, W, **packing) if packing else x @ W.T  # both by W^T
    return product_on_cpu(x, W, packing)


def product_on_cpu(x, W, packing):  # skip this: the same, quicker on a CPU
    if packing:  # quicker in float32
        return mx.quantized_matmul(x.astype(mx.float32), W, **packing).astype(x.dtype)
    if W.dtype == mx.float32 or W.size < 2**20:
        return x @ W.T
    upper, lower = mx.split(W, [len(W) // 2])  # 16-bit numbers: half of W for each of two threads
    return mx.concatenate([x @ upper.T, mx.matmul(x, lower.T, stream=SECOND_THREAD)], axis=-1)


# ---- 3. RMSNorm: rows go in; the same rows, each scaled to a common size, come out.
def rms_norm(x, weight, eps):  # (..., D or d) -> the same; arXiv 1910.07467
    """x / sqrt(mean(x^2) + eps) * weight: so all layers read numbers of about one size."""
    if not FUSED:
        x32 = x.astype(mx.float32)  # a sum of a thousand squares needs more than 8 bits
        mean_square = mx.mean(x32 * x32, axis=-1, keepdims=True)
        return weight * (x32 * mx.rsqrt(mean_square + eps)).astype(x.dtype)
    return mx.fast.rms_norm(x, weight, eps)


# ---- 4. RoPE: queries or keys (section 5) go in; they come out rotated by their positions. The dot
# product of a query and a key then depends also on how far apart they are: so token order gets in.
def apply_rope(x, offset, theta):  # (heads, L, d) -> (heads, L, d); arXiv 2104.09864
    """Rotate (x[j], x[j + d/2]) of row i by (offset + i) * theta^(-2j/d) radians; theta is 1e6."""
    L, d = x.shape[-2:]
    if not FUSED:
        position = offset + mx.arange(L)  # row i stands at offset + i
        frequency = theta ** (-mx.arange(0, d, 2, dtype=mx.float32) / d)  # fast to slow clock hands
        angle = position[..., None] * frequency  # float32: bfloat16 would round 257 to 256
        cos = mx.cos(angle).astype(x.dtype)
        sin = mx.sin(angle).astype(x.dtype)
        a, b = mx.split(x, 2, axis=-1)  # the pairs (x[j], x[j + d/2]), as in training
        return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return mx.fast.rope(x, d, traditional=False, base=theta, scale=1.0, offset=offset)  # same pairs


# ---- 5. Attention: each token's row goes in; what it gathers from all tokens so far comes out.
# A row makes a query (what it looks for), a key (what it offers) and a value (what it hands over),
# in several heads, to look for several things at once. Earlier keys and values are in the cache.
def attention(x, weights, config, layer, cache, offset):  # (L, D) -> (L, D)
    """Row i stands at offset + i; the cache holds `offset` rows. o_proj: back to D numbers."""
    q, k, v = queries_keys_values(x, weights, config, layer, offset)
    keys, values = cache[layer]  # (K, size, d) each, with room for `size` tokens
    end = offset + len(x)
    keys[:, offset:end] = k  # written into the cache itself: no copy (only grow_cache makes one)
    values[:, offset:end] = v
    mixed = dot_product_attention(q, keys[:, :end], values[:, :end]).swapaxes(0, 1)  # (L, H, d)
    return linear(mixed.reshape(len(x), -1), weights, f"model.layers.{layer}.self_attn.o_proj")


def queries_keys_values(x, weights, config, layer, offset):  # -> (H, L, d), (K, L, d), (K, L, d)
    """Three products, cut into heads; each query and key passes RMSNorm (QK-norm), then RoPE."""
    name = f"model.layers.{layer}.self_attn"
    by_head = (*x.shape[:-1], -1, config["head_dim"])  # (L, heads * d) -> (L, heads, d)
    q = linear(x, weights, f"{name}.q_proj").reshape(by_head).swapaxes(-3, -2)  # -> (heads, L, d)
    k = linear(x, weights, f"{name}.k_proj").reshape(by_head).swapaxes(-3, -2)
    v = linear(x, weights, f"{name}.v_proj").reshape(by_head).swapaxes(-3, -2)
    q = rms_norm(q, weights[f"{name}.q_norm.weight"], config["rms_norm_eps"])
    k = rms_norm(k, weights[f"{name}.k_norm.weight"], config["rms_norm_eps"])
    both = apply_rope(mx.concatenate([q, k], axis=-3), offset, config["rope_theta"])  # in one call
    return *mx.split(both, [q.shape[-3]], axis=-3), v  # q, k, v


def dot_product_attention(q, k, v):  # (H, L, d), (K, S, d), (K, S, d) -> (H, L, d)
    """For each query a weighted mean of the values; weights, `grouped`: see the next function."""
    if not FUSED:
        p = attention_weights(q, k).reshape(len(k), -1, k.shape[1])  # (K, H/K * L, S) as `grouped`
        return (p @ v).reshape(q.shape)
    kernel = mx.fast.scaled_dot_product_attention
    return kernel(q[None], k[None], v[None], scale=q.shape[-1] ** -0.5, mask="causal")[0]


def attention_weights(q, k):  # (H, L, d), (K, S, d) -> (H, L, S); arXiv 2305.13245
    """softmax(q k^T / sqrt(d)): how much each of the last L tokens takes from each of all S.
    softmax is exp(x) / sum(exp(x)). Why sqrt(d): a sum of d terms of random sign grows like it."""
    H, L, d = q.shape
    K, S, _ = k.shape
    # H / K neighbouring query heads share a key/value head: if H = 16, K = 8, 0 and 1 share 0.
    # Their queries are stacked into one matrix, for one product: no row affects another.
    grouped = q.reshape(K, (H // K) * L, d)
    scores = (grouped @ k.swapaxes(1, 2)).reshape(H, L, S).astype(mx.float32) * d**-0.5
    # Causal mask: row i is the token at position S - L + i, and sees none after it. With 3 in the
    # cache and 2 new tokens, position 3 sees 1 1 1 1 0, and position 4 sees 1 1 1 1 1.
    visible = mx.arange(S) <= mx.arange(S - L, S)[:, None]  # (L, S)
    return mx.softmax(mx.where(visible, scores, -mx.inf), axis=-1).astype(q.dtype)


# ---- 6. SwiGLU: attention mixed rows; this takes each alone. Its output is added in section 7.
def ffn(x, weights, layer):  # (L, D) -> (L, F) -> (L, D); arXiv 2002.05202
    """down(silu(gate(x)) * up(x)). silu(z) = z * sigmoid(z) = z / (1 + exp(-z)) is nearly z where z
    is large, and nearly 0 where it is far below 0: it scales each number of up(x), or drops it."""
    name = f"model.layers.{layer}.mlp"
    gate = linear(x, weights, f"{name}.gate_proj")
    up = linear(x, weights, f"{name}.up_proj")
    return linear(gate * mx.sigmoid(gate) * up, weights, f"{name}.down_proj")


# ---- 7. Transformer block: rows (the residual stream) go in; the same rows, plus two things, out.
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
    """A last RMSNorm, then products with V rows, one per token (if tied, embed_tokens has them)."""
    x = rms_norm(x, weights["model.norm.weight"], config["rms_norm_eps"])
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
    size = min(keys.shape[1] for keys, _ in cache)  # they differ if a Ctrl-C cut the loop below
    if needed > size:
        more = min(max(size // 4, 256, needed - size), limit - size)
        for layer in range(len(cache)):  # layer by layer, to spare memory
            cache[layer] = [mx.pad(rows, [(0, 0), (0, more), (0, 0)]) for rows in cache[layer]]
            mx.eval(cache[layer])


# ---- 9. Sampling: logits go in; one token id comes out.
def sample(logits, temperature=0.0, top_p=1.0, top_k=0, key=None):  # (V,) -> ()
    """The likeliest token at temperature 0, else a draw from softmax(logits / temperature)."""
    if temperature < 1e-5:
        return mx.argmax(logits)
    logits = logits.astype(mx.float32) / temperature  # bfloat16 spoils the sums of softmax, top_p
    kept = filter_logits(logits, top_p, top_k) if top_p < 1 or top_k > 0 else logits
    return mx.random.categorical(kept, key=key)  # applies softmax itself; key is its random seed


def filter_logits(logits, top_p=1.0, top_k=0):  # (V,) -> (V,); top-p: arXiv 1904.09751
    """Keep the top_k likeliest tokens (0: all) and, of these, the fewest that together reach top_p.
    All others get minus infinity; the likeliest always stays."""
    count = top_k if 0 < top_k < len(logits) else len(logits)
    best = mx.argpartition(-logits, kth=count - 1)[:count]  # in any order: quicker, with top_k
    best = best[mx.argsort(-logits[best])]  # likeliest first
    before = mx.cumsum(mx.softmax(logits[best]), inclusive=False)  # the sum of all likelier ones
    keep = (before < max(top_p, 1e-9)) | (top_p >= 1)  # top_p 0 keeps one; 1 all, despite rounding
    kept = mx.where(keep, logits[best], -mx.inf)
    return mx.put_along_axis(mx.full(logits.shape, -mx.inf), best, kept, axis=0)


# ---- 10. Generation: prompt ids go in; the ids of the answer come out, one by one.
def generate(ids, weights, config, stop, max_tokens=100, seed=None, cache=None, offset=0, **draw):
    """Yield ids, until one is in `stop` (not yielded), max_tokens or the context is used up.
    draw is for sample; a seed gives the same ids again. A cache holds `offset` ids, and grows."""
    ids = [int(token_id) for token_id in ids]
    end = offset + len(ids)
    limit = min(end + max_tokens - 1, config["max_position_embeddings"])  # fed at most; last is not
    if not ids or end > limit or min(ids) < 0 or max(ids) >= config["vocab_size"]:
        raise ValueError(f"the prompt ends at {end}: it needs 1 to {limit} ids of the vocabulary")
    cache = cache or make_cache(weights, config, 0)  # empty; the next line makes room
    grow_cache(cache, end, limit)
    for start in range(0, len(ids), CHUNK):
        logits = forward(ids[start : start + CHUNK], weights, config, cache, offset + start)
        mx.eval(cache)  # computes this chunk, not its logits: only the last ones are used, below
    rng = random.Random(seed)  # without a seed, different each time
    for position in range(end, limit + 1):  # at limit a token is drawn, but not fed
        finite = mx.isfinite(logits).all()
        token = sample(logits, key=mx.random.key(rng.getrandbits(64)), **draw)
        mx.async_eval(token, finite)  # starts the computation, and does not wait for it
        if position < limit:
            grow_cache(cache, position + 1, limit)
            logits = forward(token[None], weights, config, cache, position)
            mx.async_eval(logits)  # before .item() waits, so the device need not wait for Python
        if not finite.item():
            raise ValueError("the logits are not finite: damaged weights, or a dtype too narrow")
        if token.item() in stop:
            return
        yield token.item()


# ---- 11. Command line: arguments go in; the text goes to stdout, all around it to stderr.
def main():
    parser = argument_parser('Continue "The capital of France is", or another text; - reads stdin.')
    parser.add_argument("prompt", nargs="*", default=["The capital of France is"], help="the text")
    args = parser.parse_intermixed_args()
    prompt = os.fsencode(" ".join(args.prompt)).decode("utf-8", "replace")  # not UTF-8: replaced
    if prompt == "-":
        prompt = Path("/dev/stdin").read_text("utf-8-sig", "replace").rstrip("\n")
    if not prompt.strip():
        parser.error("the prompt is empty")
    weights, config, tokenizer = load_model(args)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids  # no start token: Qwen3 has none
    note(f"Prompt: {prompt}\n{'-' * 60}\nOutput: ", end="")
    print(prompt, end="", flush=True)  # stdout gets the whole text
    start = time.perf_counter()
    answer = []
    stream(
        generate(ids, weights, config, config["eos_token_id"], **options(args)), tokenizer, answer
    )
    seconds = time.perf_counter() - start
    if len(answer) == min(args.max_tokens, config["max_position_embeddings"] - len(ids) + 1):
        note("(cut: --max-tokens or the context is used up)")
    peak = f"peak memory {mx.get_peak_memory() / 1e9:.2g} GB"
    note(f"Time: {seconds:.2f}s ({len(ids)} tokens read, {len(answer)} written, {peak})")


def argument_parser(description):  # with the flags that all programs here share
    parser = argparse.ArgumentParser(description=description, usage=argparse.SUPPRESS)  # no usage
    flag = parser.add_argument
    flag("--model", help="a folder with a dense Qwen3 (Qwen3-0.6B, else the bundled miniature)")
    flag("--max-tokens", type=ranged(int, 1), default=100, help="stop after N tokens (%(default)s)")
    flag("--temperature", type=ranged(float), default=0.0, help="0: only the best (%(default)s)")
    flag("--top-k", type=ranged(int), default=0, help="among K likeliest, 0: all (%(default)s)")
    flag("--top-p", type=ranged(float, 0, 1), default=1.0, help="the fewest that reach P (1.0)")
    flag("--seed", type=ranged(int), help="a number that makes the draws repeatable")
    flag("--dtype", choices=["float32", "bfloat16", "float16"], help="compute in this type instead")
    return parser


def ranged(kind, low=0, high=2**63):  # a type for argparse
    def number(text):
        if low <= kind(text) <= high:
            return kind(text)
        raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")

    return number


def options(args):  # the flags that generate takes
    return {key: vars(args)[key] for key in ("max_tokens", "seed", "temperature", "top_p", "top_k")}


def load_model(args):  # find, load and announce what --model and --dtype ask for
    folder = find_model(args.model)
    try:
        weights, config, tokenizer = load(folder, args.dtype and getattr(mx, args.dtype))
        forward([0], weights, config, make_cache(weights, config, 1), 0)  # lazy: checks the shapes
    except Exception as error:
        way = "see python -m examples.check and python -m examples.download, in the repository"
        raise ValueError(f"{folder} cannot be run ({error}); {way}") from None
    note(f"Model: {folder} ({config['num_hidden_layers']} layers, {config['hidden_size']} dim)")
    return weights, config, tokenizer


def find_model(name=None):  # the folder; without a name Qwen3-0.6B beside this file, if it is there
    here = Path(os.path.relpath(Path(__file__).resolve().parent))  # short in messages
    folder = Path(name).expanduser() if name else here / "Qwen3-0.6B"
    if not name and not any(folder.glob("model*.safetensors")):
        note("Without Qwen3-0.6B (python -m examples.download gets it) a miniature answers.")
        folder = here / "tests/Qwen3-mini"
    return folder


def stream(token_ids, tokenizer, answer):
    """Print characters as soon as they are whole, and collect the ids in `answer`."""
    decoder = tokenizers.decoders.DecodeStream(skip_special_tokens=False)
    printed = 0
    try:
        for token_id in token_ids:
            answer.append(token_id)
            printed += sys.stdout.write(decoder.step(tokenizer, token_id) or "")
            sys.stdout.flush()
    finally:  # a character may be spread over several tokens: what was held back
        print(tokenizer.decode(answer, skip_special_tokens=False)[printed:], flush=True)


def note(text, end="\n"):
    print(text, end=end, file=sys.stderr, flush=True)


def run(program):
    """Run a main function. An error is one line on stderr and exit code 1; Ctrl-C is 130."""
    status = 0
    try:
        sys.stdout.reconfigure(errors="replace")
        program()
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        status = {KeyboardInterrupt: 130, BrokenPipeError: 0}.get(type(error), 1)
        if status == 1:
            note(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}")
    os._exit(status)  # without closing stdout, since a full disk would complain again


if __name__ == "__main__":
    run(main)
