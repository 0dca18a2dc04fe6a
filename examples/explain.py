"""What happens inside the model between a prompt and its next token?

Every number here is the model's own. The head turns the residual stream into words after any layer,
not only the last: this is the logit lens, and it shows where the answer appears. The attention map
shows how much each token takes from each earlier one in one head.

    python -m examples.explain "The capital of France is" --layer 3 --head 1

Logit lens: nostalgebraist (2020), lesswrong.com/posts/AcKRB8wDpdaN6v6ru
"""

import unicodedata

import mlx.core as mx

import llm_inference as llm
from examples.chat_template import ChatTemplate
from examples.common import encode, read_stdin

BAR = 24  # characters for 100 %
MAP = 54  # tokens that fit beside a row's label in 80 columns
SHADES = " .:-=+*#@"  # from 0 to 1


def main():
    usual = "The capital of France is"
    parser = llm.argument_parser(
        f'Show what the model does. Example: python -m examples.explain "{usual}" --layer 3'
    )
    parser.add_argument("prompt", nargs="*", default=[usual], help=f"({usual}); - reads stdin")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message in a chat")
    parser.add_argument("--layer", type=llm.ranged(int, 0), default=0, help="of the map, from 0 on")
    parser.add_argument("--head", type=llm.ranged(int, 0), default=0, help="of the map, from 0 on")
    args = parser.parse_intermixed_args()
    prompt = " ".join(args.prompt)
    if prompt == "-":
        prompt = read_stdin()
    if not prompt.strip():
        parser.error("the prompt is empty")
    folder = llm.find_model(args.model)
    args.model = str(folder)
    weights, config, tokenizer = llm.load_model(args)
    if args.layer >= config["num_hidden_layers"] or args.head >= config["num_attention_heads"]:
        sizes = f"{config['num_hidden_layers']} layers and {config['num_attention_heads']} heads"
        parser.error(f"--layer and --head count from 0, and this model has {sizes}")
    stop = set(config["eos_token_id"])
    if args.chat:
        template = ChatTemplate(folder, tokenizer)
        ids = template.encode([{"role": "user", "content": prompt}])
        stop |= template.end_of_turn
    else:
        ids = encode(prompt, tokenizer)
    cache = llm.make_cache(weights, config, len(ids))
    list(llm.generate(ids, weights, config, set(), max_tokens=1, cache=cache))  # fills the cache

    show_tokens(ids, tokenizer)
    show_layers(ids, weights, config, cache, tokenizer)
    show_attention(ids, weights, config, cache, tokenizer, args.layer, args.head)
    show_cache(ids, config, cache)
    print("" if args.chat else prompt, end="", flush=True)
    answer = llm.generate(ids, weights, config, stop, **llm.options(args))
    llm.stream(answer, tokenizer, [])


def show_tokens(ids, tokenizer):
    print(f"Tokens ({len(ids)}): the text as the model gets it")
    for position, token_id in enumerate(ids):
        print(f"  {position:>6}  id {token_id:>6}  {shown(tokenizer, token_id, 50)}")


def show_layers(ids, weights, config, cache, tokenizer):
    """The last token once more, layer by layer: its keys and values are written over themselves."""
    print("Logit lens: the likeliest next token if the model ended after this layer")
    x = llm.embed(ids[-1:], weights, config)
    for layer in range(config["num_hidden_layers"]):
        x = llm.transformer_block(x, weights, config, layer, cache, len(ids) - 1)
        p = mx.softmax(llm.head(x, weights, config)[0].astype(mx.float32))
        best = mx.argmax(p).item()
        print(f"  layer {layer:>3}  {bar(p[best].item())}  {shown(tokenizer, best, 30)}")
    print("Next token: the five likeliest")
    for token_id in mx.argsort(-p)[:5].tolist():
        print(f"             {bar(p[token_id].item())}  {shown(tokenizer, token_id, 30)}")


def show_attention(ids, weights, config, cache, tokenizer, layer, head):
    """A row for each of the last tokens; its columns are the same tokens."""
    first = max(0, len(ids) - MAP)
    before = config | {"num_hidden_layers": layer}
    x = llm.hidden_states(ids[first:], weights, before, cache, first)
    norm = weights[f"model.layers.{layer}.input_layernorm.weight"]
    x = llm.rms_norm(x, norm, config["rms_norm_eps"])
    q, _, _ = llm.queries_keys_values(x, weights, config, layer, first)
    keys, _ = cache[layer]
    taken = llm.attention_weights(q, keys[:, : len(ids)])[head, :, first:].tolist()
    print(f"Attention of layer {layer}, head {head}: what a row's token takes, 0 '{SHADES}' 1")
    print(" " * 26 + "".join(str(position % 10) for position in range(first, len(ids))))
    for row, shares in enumerate(taken):
        cells = [SHADES[round(share * (len(SHADES) - 1))] for share in shares]
        text = shown(tokenizer, ids[first + row], 14)
        print(f"  {first + row:>6}  {text}{' ' * (16 - columns(text))}{''.join(cells)}".rstrip())


def show_cache(ids, config, cache):
    sizes = f"{config['num_key_value_heads']} heads x {config['head_dim']} numbers"
    in_all = sum(keys.nbytes + values.nbytes for keys, values in cache)  # it has len(ids) rows
    print(f"KV cache: 2 x {len(cache)} layers x {sizes} x {cache[0][0].itemsize} bytes")
    print(f"  = {in_all // len(ids):,} bytes a token, {in_all:,} bytes for this prompt")


def bar(probability):
    """A probability as percentage and bar: ' 65.8% ################        '."""
    return f"{probability:>6.1%} {'#' * round(BAR * probability):<{BAR}}"


def shown(tokenizer, token_id, room):
    """The token's text in quotes, control characters escaped, cut to `room` columns."""
    text = repr(tokenizer.decode([token_id], skip_special_tokens=False))
    if columns(text) <= room:
        return text
    while columns(text) > room - 1:
        text = text[:-1]
    return text + "~"


def columns(text):
    """Its width in a terminal, where wide characters take two columns."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


if __name__ == "__main__":
    llm.run(main)
