"""What --explain prints: the way of one prompt through the model, with the model's own numbers, in 80 columns.

Everything comes from the public functions of llm_inference.py. A model cut after n layers is the same checkpoint with a
smaller num_hidden_layers: applying the head there is the "logit lens" (nostalgebraist, 2020).
"""
import unicodedata

import mlx.core as mx

from llm_inference import forward, generate, make_cache

WIDTH, BAR = 80, 24


def shown(tokenizer, token_id, room):
    """The token's text in quotes, control characters escaped, cut to `room` terminal columns (CJK takes two)."""
    text, used = repr(tokenizer.decode([token_id], skip_special_tokens=False)), 0
    for index, character in enumerate(text):
        used += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if used > room:
            return text[:index - 1] + "~"
    return text


def explain(ids, weights, config, tokenizer):
    """Print the tokens, the likeliest next token after each layer, the five likeliest in the end, and the cache's cost."""
    ids, layers = list(ids), config["num_hidden_layers"]
    cache = make_cache(weights, config, len(ids))
    next(generate(ids, weights, config, set(), 1, cache=cache))  # fills the cache, and checks the prompt

    print(f"Tokens ({len(ids)}): the text as the model gets it")
    for position, token_id in enumerate(ids):
        print(f"  {position:>6}  id {token_id:>6}  {shown(tokenizer, token_id, 50)}")

    print("Logit lens: the likeliest next token if the model ended after this layer")
    for count in range(1, layers + 1):
        logits = forward(ids[-1:], weights, config | {"num_hidden_layers": count}, cache, len(ids) - 1)
        p = mx.softmax(logits.astype(mx.float32))
        best = mx.argmax(p).item()
        print(f"  layer {count:>3}  {bar(p[best].item())}  {shown(tokenizer, best, 30)}")

    print("Next token: the five likeliest")
    for token_id in mx.argsort(-p)[:5].tolist():
        print(f"             {bar(p[token_id].item())}  {shown(tokenizer, token_id, 30)}")

    token_bytes = sum(array.nbytes for pair in cache for array in pair) // len(ids)
    print(f"KV cache: 2 x {layers} layers x {config['num_key_value_heads']} heads x {config['head_dim']} numbers x "
          f"{cache[0][0].itemsize} bytes\n  = {token_bytes:,} bytes a token, {token_bytes * len(ids):,} bytes for this prompt")


def bar(probability):
    """A probability as percentage and bar: ' 65.8% ################        '."""
    return f"{probability:>6.1%} {'#' * round(BAR * probability):<{BAR}}"
