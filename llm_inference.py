#!/usr/bin/env python3
"""What happens between a prompt and its answer inside a large language model: Qwen3 in one file, on MLX.

    text -> token ids -> embedding -> N x (RMSNorm, attention, RMSNorm, SwiGLU) -> head -> sampling -> token id -> text
                 ^ each new token starts here again; what it needs of the earlier ones waits in the KV cache

Axis letters, in every signature: L tokens fed now, S tokens so far (earlier ones and these), D hidden size,
F feed-forward size, V vocabulary, H query heads, K key/value heads, d head_dim. One sequence at a time: no batch axis.
Sources: Qwen3 (arXiv 2505.09388), RMSNorm (1910.07467), RoPE (2104.09864), grouped-query attention (2305.13245),
SwiGLU (2002.05202), top-p (1904.09751). Importing loads nothing; the model's functions are pure, but fill the cache.
"""
import argparse, contextlib, functools, itertools, json, os, re, runpy, sys, time
from pathlib import Path
try:
    import mlx.core as mx, tokenizers
except ImportError as error:
    sys.exit(f"llm_inference.py: {error}; pip install -r requirements.txt helps (on a Mac: macOS 14 and an arm64 Python)")

CHUNK = 128 if mx.default_device().type == mx.cpu else 512  # prompt tokens a pass; a prefill's memory grows with it
HERE, LANE, BLAS = Path(__file__).resolve().parent, mx.new_stream(mx.cpu), "openblas" in os.environ.get("LD_PRELOAD", "")

# ---- 1. Checkpoint: a folder goes in; a flat dict of arrays under their published names, config and tokenizer come out.

def load(folder, dtype=None):
    """A model folder -> weights {name: array}, config (the file's own dict, nested parts flattened), tokenizer.

    `dtype`, such as mx.float32, converts the floating-point tensors. ValueError says what cannot be run, and why.
    """
    def read(name, parse=lambda path: dict(json.loads(Path(path).read_bytes()))):
        path = Path(folder, name)
        if not path.is_file(): raise ValueError(f"{path} is missing: a model is config.json, tokenizer.json, model.safetensors, no GGUF")
        if b"git-lfs" in path.open("rb").read(40): raise ValueError(f"{path} is a Git LFS pointer; git lfs pull gets the file")
        try: return parse(str(path))
        except Exception as error: raise ValueError(f"{path} is incomplete or damaged, download it again ({error})")
    config = {"tie_word_embeddings": False, "plain": mx.default_device().type == mx.cpu} | read("config.json")
    for part in "rope_scaling", "rope_parameters", "quantization", "quantization_config": config = (config.get(part) or {}) | config
    runs = {"model_type": "qwen3", "rope_type": "default", "type": "default", "quant_method": None, "mode": "affine",
            "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
    sizes = ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads",
             "max_position_embeddings", "rope_theta", "rms_norm_eps"]
    odd = [f"{key} is {config[key]!r}, not {need!r}" for key, need in runs.items() if config.get(key) not in (None, need)]
    odd += [f"{key} is not a number" for key in sizes if not isinstance(config.get(key), (int, float))]
    if odd: raise ValueError(f"{folder}/config.json: {'; '.join(odd[:3])} (this file runs dense Qwen3)")
    N, D, F, V, H, K = (config[key] for key in sizes[:6])
    d = config["head_dim"] = config.get("head_dim") or D // H  # 0.6B: 16 heads of 128 make 2048, twice its hidden size

    block = {"self_attn.q_proj": (H * d, D), "self_attn.k_proj": (K * d, D), "self_attn.v_proj": (K * d, D),
             "self_attn.o_proj": (D, H * d), "self_attn.q_norm": (d,), "self_attn.k_norm": (d,), "input_layernorm": (D,),
             "post_attention_layernorm": (D,), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)}
    shapes = {f"model.layers.{layer}.{name}": shape for layer in range(N) for name, shape in block.items()}
    shapes |= {"model.embed_tokens": (V, D), "model.norm": (D,)} | ({} if config["tie_word_embeddings"] else {"lm_head": (V, D)})
    index, weights = "model.safetensors.index.json", {}
    for file in set(read(index)["weight_map"].values()) if Path(folder, index).exists() else ["model.safetensors"]:
        weights |= {name: array for name, array in read(file, mx.load).items() if "lm_head" in shapes or "lm_head." not in name}
    dense = ((name, rows(weights, name, shape[-1])) for name, shape in shapes.items() if f"{name}.weight" in weights)  # lazy
    fits = {name: a.shape if mx.issubdtype(a.dtype, mx.floating) else a.dtype for name, a in dense}  # FP8 shows as uint8
    odd = [f"{name} is {fits.get(name, 'missing')}, not {need}" for name, need in shapes.items() if fits.get(name) != need]
    odd += [f"{name} is unknown" for name in weights if re.sub(r"\.(weight|scales|biases)$", "", name) not in shapes]
    if odd: raise ValueError(f"{folder}: {len(odd)} tensors do not fit config.json: {'; '.join(odd[:3])}")
    dtype = dtype or rows(weights, "model.embed_tokens", D).dtype  # one type for all, or results turn float32 by promotion
    mx.eval(weights := {name: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a for name, a in weights.items()})

    tokenizer = read("tokenizer.json", tokenizers.Tokenizer.from_file)
    # Where to stop, the files do not agree: stop on all they name, be it an id, a list of ids or a text.
    said = [read(file.name).get(key) for file in Path(folder).glob("*config.json") for key in ("eos_token_id", "eos_token")]
    ends = {e if isinstance(e, int) else tokenizer.token_to_id(str(e or "")) for end in said for e in (end if isinstance(end, list) else [end])}
    return weights, config | {"eos_token_id": sorted(ends - {None})}, tokenizer

# ---- 2. Embedding and matrix products: token ids go in; each becomes a row of D numbers, the residual stream.

def rows(weights, name, width, index=slice(None)):  # -> (..., width)
    """Rows of a stored matrix. A quantized one packs its numbers into uint32, with a scale and a bias per group."""
    if f"{name}.scales" not in weights: return weights[f"{name}.weight"][index]
    packed, scales, biases = (weights[f"{name}.{part}"][index] for part in ("weight", "scales", "biases"))
    return mx.dequantize(packed, scales, biases, width // scales.shape[-1], packed.shape[-1] * 32 // width)

def linear(x, weights, name):  # (L, in) -> (L, out)
    """y = x W^T, with W (out, in) as stored: nearly all weights are here, and nearly all the time goes here."""
    W, scales, cpu = weights[f"{name}.weight"], weights.get(f"{name}.scales"), mx.default_device().type == mx.cpu
    if scales is not None:  # bits and group size are read off the shapes, so they may be mixed; a CPU is slow in 16 bits
        group, bits, wide = x.shape[-1] // scales.shape[-1], W.shape[-1] * 32 // x.shape[-1], mx.float32 if cpu else x.dtype
        scales, biases = scales.astype(wide), weights[f"{name}.biases"].astype(wide)
        return mx.quantized_matmul(x.astype(wide), W, scales, biases, True, group, bits).astype(x.dtype)
    if not cpu or W.size < 2**20 or W.dtype == mx.float32 and (BLAS or len(x) > 1): return (W @ x.T).T if BLAS and len(x) == 1 else x @ W.T
    return mx.concatenate([x @ W[:len(W) // 2].T, mx.matmul(x, W[len(W) // 2:].T, stream=LANE)], axis=-1)  # a thread each half

# ---- 3. RMSNorm: vectors go in; the same directions, brought to a common length and weighted by channel, come out.

def rms_norm(x, weight, eps, plain=False):  # (..., D) -> (..., D)
    """x / sqrt(mean(x^2) + eps) * weight. Unlike LayerNorm it subtracts no mean and adds no bias."""
    if not plain: return mx.fast.rms_norm(x, weight, eps)  # the lines below as one kernel
    x32 = x.astype(mx.float32)
    return weight * (x32 * mx.rsqrt(mx.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)

# ---- 4. RoPE: queries or keys go in; turned according to their position, so that q . k knows the distance, they come out.

def apply_rope(x, offset, theta, plain=False):  # (..., L, d) -> (..., L, d)
    """Row i, at position offset + i, has each pair (x[j], x[j + d/2]) turned by (offset + i) * theta^(-2j/d) radians."""
    L, d = x.shape[-2:]
    if not plain: return mx.fast.rope(x.reshape(-1, L, d), d, traditional=False, base=theta, scale=1.0, offset=offset).reshape(x.shape)
    # (L, d/2) angles, in float32: bfloat16 would round position 257 to 256.
    angle = mx.arange(offset, offset + L, dtype=mx.float32)[:, None] * theta ** (-mx.arange(0, d, 2, dtype=mx.float32) / d)
    cos, sin = mx.cos(angle).astype(x.dtype), mx.sin(angle).astype(x.dtype)
    a, b = x[..., :d // 2], x[..., d // 2:]  # pairs are (j, j + d/2): so the checkpoint orders a head's rows
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

# ---- 5. Attention: each token's vector goes in; what it gathers from itself and the tokens before it comes out.

def attend(q, k, v, plain=False):  # (H, L, d), (K, S, d), (K, S, d) -> (H, L, d)
    """softmax(q k^T / sqrt(d) + causal mask) v, where each key/value head serves a group of H/K query heads."""
    (H, L, d), (K, S, _), scale = q.shape, k.shape, q.shape[-1] ** -0.5
    if not plain: return mx.fast.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale, mask="causal")[0]
    grouped = q.reshape(K, H // K * L, d)  # a group's queries stacked: keys and values need no copies
    scores = (grouped @ k.swapaxes(1, 2)).astype(mx.float32).reshape(K, H // K, L, S) * scale  # float32 up to the shares p
    visible = mx.arange(S) <= mx.arange(S - L, S)[:, None]  # (L, S): row i is the token at position S - L + i
    p = mx.softmax(mx.where(visible, scores, -mx.inf) if L > 1 else scores, axis=-1).astype(v.dtype)  # a single row sees all
    return (p.reshape(K, H // K * L, S) @ v).reshape(H, L, d)

def attention(x, weights, config, layer, cache, offset):  # (L, D) -> (L, D)
    """Project to heads, normalize q and k head by head, turn them, store k and v, attend, project back."""
    name, d, L = f"model.layers.{layer}.self_attn", config["head_dim"], len(x)
    eps, theta, plain = config["rms_norm_eps"], config["rope_theta"], config.get("plain")
    q, k, v = (linear(x, weights, f"{name}.{part}_proj").reshape(L, -1, d).swapaxes(0, 1) for part in "qkv")
    q, k = rms_norm(q, weights[f"{name}.q_norm.weight"], eps, plain), rms_norm(k, weights[f"{name}.k_norm.weight"], eps, plain)
    q, k = mx.split(apply_rope(mx.concatenate([q, k]), offset, theta, plain), [len(q)])  # (H, L, d), (K, L, d): turned alike
    for stored, new in zip(cache[layer], (k, v)): stored[:, offset:offset + L] = new  # in place: the past is never copied
    out = attend(q, *(stored[:, :offset + L] for stored in cache[layer]), plain)
    return linear(out.swapaxes(0, 1).reshape(L, -1), weights, f"{name}.o_proj")

# ---- 6. SwiGLU: each token's vector goes in; what this layer knows to add to it comes out, token by token.

def ffn(x, weights, layer):  # (L, D) -> (L, F) -> (L, D)
    """down(silu(gate(x)) * up(x)), with silu(z) = z * sigmoid(z)."""
    name = f"model.layers.{layer}.mlp"
    gate, up = linear(x, weights, f"{name}.gate_proj"), linear(x, weights, f"{name}.up_proj")
    return linear(gate * mx.sigmoid(gate) * up, weights, f"{name}.down_proj")

# ---- 7. Transformer block: the residual stream goes in; with two contributions added to it, it comes out.

def transformer_block(x, weights, config, layer, cache, offset):  # (L, D) -> (L, D)
    """x += attention(rms_norm(x)), then x += ffn(rms_norm(x))."""
    name, eps, plain = f"model.layers.{layer}", config["rms_norm_eps"], config.get("plain")
    x = x + attention(rms_norm(x, weights[f"{name}.input_layernorm.weight"], eps, plain), weights, config, layer, cache, offset)
    return x + ffn(rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps, plain), weights, layer)

# ---- 8. The whole model: token ids go in; a score (logit) for every possible next token comes out.

def make_cache(weights, config, size):
    """One (keys, values) pair per layer, each (K, size, d) in the weights' type: room for `size` tokens."""
    shape, dtype = (config["num_key_value_heads"], size, config["head_dim"]), weights["model.norm.weight"].dtype
    return [(mx.zeros(shape, dtype), mx.zeros(shape, dtype)) for _ in range(config["num_hidden_layers"])]

def forward(token_ids, weights, config, cache, offset):  # (L,) -> (V,)
    """Logits for the token after the last one; the first of token_ids stands at position `offset`."""
    x = rows(weights, "model.embed_tokens", config["hidden_size"], mx.array(token_ids))
    for layer in range(config["num_hidden_layers"]): x = transformer_block(x, weights, config, layer, cache, offset)
    x = rms_norm(x[-1:], weights["model.norm.weight"], config["rms_norm_eps"], config.get("plain"))
    return linear(x, weights, "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head")[0]  # the head

# ---- 9. Sampling: logits go in; one token id comes out.

def sample(logits, temperature=0.0, top_p=1.0, top_k=0):  # (V,) -> ()
    """The best token at temperature 0, else a draw from softmax(logits / temperature) among the top_k likeliest tokens
    and, of these, the fewest whose probabilities reach top_p. top_k 0 and top_p 1 filter nothing.
    """
    if temperature < 1e-5: return mx.argmax(logits)
    logits = logits.astype(mx.float32) / temperature  # sums of many small probabilities go astray in bfloat16
    ids = mx.argpartition(-logits, top_k - 1)[:top_k] if 0 < top_k < len(logits) else mx.arange(len(logits))
    if top_p >= 1: return ids[mx.random.categorical(logits[ids])]
    ids = ids[mx.argsort(-logits[ids])]  # likeliest first
    before = mx.cumsum(mx.softmax(logits[ids]), inclusive=False)  # what all likelier ones have: 0 for the best
    return ids[mx.random.categorical(mx.where(before < max(top_p, 1e-9), logits[ids], -mx.inf))]

# ---- 10. Generation: prompt ids go in; the ids of the answer come out, one by one.

def generate(prompt_ids, weights, config, stop, max_tokens=100, temperature=0.0, top_p=1.0, top_k=0, cache=None, offset=0):
    """Yield ids until one is in `stop` (it is not yielded), or max_tokens or the context's end is reached.

    A given cache holds `offset` earlier tokens. ValueError: ids outside the vocabulary, no room, logits not finite.
    """
    ids, end = list(prompt_ids), offset + len(prompt_ids)
    last = min(end + max_tokens - 1, config["max_position_embeddings"])
    cache = cache or make_cache(weights, config, last)
    if end > min(last, cache[0][0].shape[1]) or not ids or not 0 <= min(ids) <= max(ids) < config["vocab_size"]:
        raise ValueError(f"the prompt ends at token {end}; needed: 1 to {last} tokens, ids below {config['vocab_size']}")
    for start in range(0, len(ids), CHUNK):
        logits = forward(ids[start:start + CHUNK], weights, config, cache, offset + start)
        mx.eval(cache)  # nobody has asked for the logits yet, so the head has not run

    # An id, or -1 where a logit is NaN or infinite (argmax would say 0): checked on the device, so that nobody waits for it.
    choose = lambda logits: mx.where(mx.isfinite(logits).all(), sample(logits, temperature, top_p, top_k).astype(mx.int32), -1)
    mx.async_eval(following := choose(logits))
    for position in range(end, min(last, cache[0][0].shape[1]) + 1):
        token = following
        if position < last: mx.async_eval(following := choose(forward(token[None], weights, config, cache, position)))
        token_id = token.item()  # read only now that the next step is queued: the device never waits for Python
        if token_id < 0: raise ValueError("the logits are not finite: the weights are damaged, or overflow in this dtype")
        if token_id in stop: return
        yield token_id

# ---- 11. Command line: arguments go in; the answer streams to stdout, everything around it to stderr.

note = functools.partial(print, file=sys.stderr, flush=True)

def find_model(name):
    """--model -> folder: as given, downloaded, or (no weights yet and offline) the bundled miniature."""
    folder = Path(re.sub(r"[^/]*\.safetensors$", "", name) if name else HERE / "Qwen3-0.6B").expanduser()
    if any(folder.glob("*.safetensors")) or name and folder.exists(): return max(folder.glob("snapshots/*"), default=folder)
    try:
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        from huggingface_hub import snapshot_download  # comes with tokenizers; shows progress, resumes
        got = snapshot_download(name or "Qwen/Qwen3-0.6B", local_dir=None if name else folder, allow_patterns="*.[js]*")
        return next(Path(got).glob("*.safetensors")).parent  # offline, the hub returns a folder without weights
    except Exception as error:
        if name: raise ValueError(f"--model {name}: no such folder, and no such download now ({type(error).__name__})")
        note(f"Qwen3-0.6B cannot be downloaded now; {folder}/README.md says how to get it by hand. The bundled miniature answers.")
        return HERE / "tests" / "Qwen3-mini"

def stream(token_ids, tokenizer, answer):
    """Print characters as soon as they are whole. `answer` collects the ids; what is held back is printed in any case."""
    decoder, printed = tokenizers.decoders.DecodeStream(skip_special_tokens=False), 0
    try:
        for token_id in token_ids:
            answer.append(token_id)
            printed += sys.stdout.write(decoder.step(tokenizer, token_id) or "")  # write counts what it wrote
            sys.stdout.flush()
    finally: print(tokenizer.decode(answer, skip_special_tokens=False)[printed:], flush=True)

def main():
    """Continue a prompt with Qwen3, or chat. stdout gets the answer, stderr the rest.

      llm_inference.py ["The capital of France is"]    - reads the text from stdin
      llm_inference.py --chat ["Message"]    answer it, or converse until Ctrl-D

    --model M         a folder, or a hub name like mlx-community/Qwen3-0.6B-4bit
    --max-tokens N    stop after N (100; 2000 with --chat, 4000 with --think)
    --temperature T   0: the likeliest token, 1: as the model would draw, above:
                      wilder (0; 0.7 with --chat, 0.6 with --think)
    --top-k K         draw among the K likeliest, 0: all (0; 20 with --chat)
    --top-p P         of these, among the fewest that together reach P
                      (1; 0.8 with --chat, 0.95 with --think)
    --seed S          make the draws repeatable; without it, runs differ
    --think           chat, with thinking before the answer
    --explain         first show tokens, layers, probabilities and cache
    --plain           the spelled-out math, even where a fused kernel is quicker
    --dtype D         float32, bfloat16 or float16, whatever the files hold
    """
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)  # the page above is the help, and an error is one line
    parser.format_help, add = lambda: main.__doc__.replace("\n    ", "\n"), parser.add_argument
    add("prompt", nargs="?"), add("--model"), add("--dtype", choices=["float32", "bfloat16", "float16"])
    for flag in "--chat", "--think", "--explain", "--plain": add(flag, action="store_true")
    numbers = {"temperature": (0, 100, 0.0, 0.7, 0.6), "top_p": (0, 1, 1.0, 0.8, 0.95),  # range; text, --chat, --think
               "top_k": (0, 10**9, 0, 20, 20), "max_tokens": (1, 10**9, 100, 2000, 4000), "seed": (0, 2**63, *[time.time_ns()] * 3)}
    for key, (*_, usual) in numbers.items(): add("--" + key.replace("_", "-"), type=type(usual))
    args = parser.parse_args()
    args.chat |= args.think  # their sum: 0 text, 1 chat, 2 thinking
    for key, (low, high, *usual) in numbers.items():
        value = numbers[key] = usual[args.chat + args.think] if getattr(args, key) is None else getattr(args, key)
        if not low <= value <= high: parser.error(f"--{key.replace('_', '-')} goes from {low} to {high}, not {value}")
    prompt = "The capital of France is" if args.prompt is None and not args.chat else args.prompt
    if prompt == "-": prompt = sys.stdin.read().rstrip("\n")
    if prompt is not None and not prompt.strip(): parser.error("the prompt is empty")

    weights, config, tokenizer = load(folder := find_model(args.model), args.dtype and getattr(mx, args.dtype))
    config["plain"] |= args.plain
    mx.random.seed(numbers.pop("seed"))
    sys.stdout.reconfigure(errors="replace")
    note(f"Model: {folder.name} ({config['num_hidden_layers']} layers, {config['hidden_size']} dim, "
         f"{config['num_attention_heads']} Q heads, {config['num_key_value_heads']} KV heads)")
    encode = lambda text: tokenizer.encode(text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), add_special_tokens=False).ids
    opening, closing, reply, skip = map(encode, ["<|im_start|>", "<|im_end|>\n", "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"])
    tokenizer.add_special_tokens([token.content for token in tokenizer.get_added_tokens_decoder().values()])  # <think> as well
    tokenizer.encode_special_tokens = args.chat  # what is typed in a chat stays text, be it <|im_end|>
    dialogue, fed, cache, limit = [], [], make_cache(weights, config, 0), config["max_position_embeddings"]
    for message in [prompt] if prompt else filter(str.strip, iter(lambda: input("> " if sys.stdout.isatty() else ""), None)):
        if args.chat: dialogue += opening + encode("user\n" + message) + closing
        ids = dialogue + reply + skip * (not args.think) if args.chat else encode(message)
        room = len(ids) + min(numbers["max_tokens"], limit)
        if room > cache[0][0].shape[1]: cache = [[mx.pad(a, [(0, 0), (0, room), (0, 0)]) for a in pair] for pair in cache]
        offset = len(os.path.commonprefix([fed, ids[:-1]]))  # what the cache holds of this already
        if args.explain: runpy.run_path(str(HERE / "tests/explain.py"))["explain"](ids, weights, config, tokenizer)
        if prompt: note(f"Prompt: {prompt}", "-" * 60, *[f"(reading {len(ids)} tokens)"] * (len(ids) > CHUNK), sep="\n")
        answer, start, prefill = [], time.perf_counter(), 0
        with contextlib.nullcontext() if prompt else contextlib.suppress(KeyboardInterrupt):
            tokens = generate(ids[offset:], weights, config, config["eos_token_id"], cache=cache, offset=offset, **numbers)
            first, prefill = list(itertools.islice(tokens, 1)), time.perf_counter() - start
            if prompt: note("Output: ", end="")
            print("" if args.chat else prompt, end="", flush=True)
            stream(itertools.chain(first, tokens), tokenizer, answer)
        if len(answer) == min(numbers["max_tokens"], limit - len(ids) + 1): note("(cut: --max-tokens or the context is used up)")
        if prompt: note(f"Time: {(total := time.perf_counter() - start):.2f}s (prefill {len(ids)} tokens in {prefill:.2f} s, decode "
            f"{len(answer[1:])} tokens at {len(answer[1:]) / (total - prefill):.0f} tokens/s, peak memory {mx.get_peak_memory() / 1e9:.2g} GB)")
        text = re.sub("(?s)^.*</think>|^<think>.*", "", tokenizer.decode(answer, skip_special_tokens=False)).lstrip("\n")
        fed, dialogue = ids + answer[:-1] if answer else ids[:offset], dialogue + opening + encode("assistant\n" + text) + closing

if __name__ == "__main__":
    try: status = main()
    except (EOFError, BrokenPipeError, KeyboardInterrupt) as end: status = 130 if isinstance(end, KeyboardInterrupt) else 0
    except Exception as error: status = note("llm_inference.py:", " ".join(str(error).split())) or 1
    os._exit(status or 0)  # at once: a failed flush of a full disk's stdout must not complain twice
