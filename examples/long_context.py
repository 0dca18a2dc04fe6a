"""How does a model read further than it was trained to?

RoPE turns each pair of numbers by position * frequency, and the slow pairs have not made a whole
turn by the end of the longest text seen in training: beyond it come angles that the model has never
met. Linear interpolation divides all frequencies by a factor, so that the angles stay known, and
then even neighbours look closer than they are. YaRN leaves the quick pairs, which tell neighbours
apart, slows the others, and makes attention a little sharper.

    python -m examples.long_context --factor 4 "The capital of France is"

A config that asks for linear or YaRN runs as it says; the flags replace what it says.
Papers: linear arXiv 2306.15595, YaRN 2309.00071.
"""

import math

import mlx.core as mx

import llm_inference as llm
from examples.check import load
from examples.common import encode


def main():
    usual = "The capital of France is"
    parser = llm.argument_parser(
        "Continue a text beyond the length of training. "
        f'Example: python -m examples.long_context --factor 4 "{usual}"'
    )
    parser.set_defaults(max_tokens=30)
    parser.add_argument("prompt", nargs="*", default=[usual], help=f'"{usual}"')
    parser.add_argument("--method", choices=["linear", "yarn"], help="the config's, else yarn")
    parser.add_argument("--factor", type=llm.ranged(float, 1), help="the config's, else 4")
    args = parser.parse_intermixed_args()
    dtype = getattr(mx, args.dtype) if args.dtype else None
    folder = llm.find_model(args.model)
    weights, config, tokenizer = load(folder, dtype=dtype, stretched_rope=True)
    config = stretch(config, args.method, args.factor)
    llm.apply_rope = rope(config)  # the file looks the name up at each call, and finds this one
    print_table(config)
    ids = encode(" ".join(args.prompt), tokenizer)
    tokens = llm.generate(ids, weights, config, config["eos_token_id"], **llm.options(args))
    print(f"{len(ids)} tokens are read, then:", flush=True)
    llm.stream(tokens, tokenizer, [])


def stretch(config, method=None, factor=None):
    """The config with rope_type, factor and lengths settled; what is given counts first."""
    asked = config.get("rope_type") or config.get("type") or "default"
    method = method or ("yarn" if asked == "default" else asked)
    length = config["max_position_embeddings"]
    original = config.get("original_max_position_embeddings") or length
    factor = factor or config.get("factor") or (length / original if length > original else 4)
    if method not in ("linear", "yarn"):
        raise ValueError(f"the config has rope_type {asked!r}: --method linear or yarn replaces it")
    if not isinstance(factor, (int, float)) or not 1 <= factor < math.inf:
        raise ValueError(f"the config has factor {factor!r}: a number from 1 on is needed")
    lengths = {"original_max_position_embeddings": original}
    lengths["max_position_embeddings"] = max(length, int(original * factor))
    return config | lengths | {"rope_type": method, "factor": factor}


def usual_frequencies(config):  # -> (d/2,), radians a position
    d = config["head_dim"]
    return 1 / config["rope_theta"] ** (mx.arange(0, d, 2, dtype=mx.float32) / d)


def stretched_frequencies(config):  # -> (d/2,)
    usual = usual_frequencies(config)
    slowed = usual / config["factor"]
    if config["rope_type"] == "linear":
        return slowed
    kept = kept_share(config)
    return usual * kept + slowed * (1 - kept)


def kept_share(config):  # -> (d/2,)
    """1 for pairs that turn 32 times or more within the original length, 0 for those that do not
    turn once; from pair to pair it falls evenly in between.
    """
    d = config["head_dim"]

    def pair_that_turns(times):  # the j for which length * theta^(-2j/d) = 2 pi * times
        length = config["original_max_position_embeddings"]
        return d * math.log(length / (2 * math.pi * times)) / (2 * math.log(config["rope_theta"]))

    first = pair_that_turns(config.get("beta_fast") or 32)
    last = pair_that_turns(config.get("beta_slow") or 1)
    if config.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, d - 1)  # not d/2 - 1: so models were trained
    return 1 - mx.clip((mx.arange(d // 2) - first) / ((last - first) or 0.001), 0, 1)


def attention_factor(config):
    """A softmax over more tokens is flatter; larger cos and sin, so longer q and k, sharpen it."""

    def larger(weight):
        return 0.1 * weight * math.log(config["factor"]) + 1

    if config["rope_type"] == "linear":
        return 1.0
    if config.get("attention_factor") is not None:
        return config["attention_factor"]
    if config.get("mscale") and config.get("mscale_all_dim"):
        return larger(config["mscale"]) / larger(config["mscale_all_dim"])
    return larger(1)


def rope(config):
    """An apply_rope with the stretched frequencies; theta, already in them, goes unused."""
    d = config["head_dim"]
    inverse = 1 / stretched_frequencies(config)
    factor = attention_factor(config)

    def apply_rope(x, offset, theta):  # (heads, L, d) -> (heads, L, d)
        # MLX's rotation takes the inverses of any frequencies. Its `scale` would be for positions;
        # a factor on cos and sin is one on the result.
        turned = mx.fast.rope(
            x, d, traditional=False, base=None, scale=1.0, offset=offset, freqs=inverse
        )
        return turned * factor

    return apply_rope


def print_table(config):
    original = config["original_max_position_embeddings"]
    print(f"{config['rope_type']}: {original} positions become {config['max_position_embeddings']}")
    print(f"cos and sin are multiplied by {attention_factor(config):.4f}")
    print("pair  turns in training  positions a turn       now  slower by")
    usual = usual_frequencies(config)
    stretched = stretched_frequencies(config)
    for pair in range(0, len(usual), max(len(usual) // 16, 1)):
        turn = 2 * math.pi / usual[pair].item()
        now = 2 * math.pi / stretched[pair].item()
        print(f"{pair:4} {original / turn:18.3f} {turn:17.0f} {now:9.0f} {now / turn:10.2f}")


if __name__ == "__main__":
    llm.run(main)
