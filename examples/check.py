"""Can a folder be run, and if not, what is wrong with it?

llm_inference.py trusts its folder, and says in one line that it does not fit. Here each file is
opened, and each tensor compared with what config.json promises: names and shapes are the whole
architecture.

    python -m examples.check tests/Qwen3-mini
"""

import argparse
import json
import re
from pathlib import Path

import mlx.core as mx
from tokenizers import Tokenizer

import llm_inference as llm

SIZES = ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"]
SIZES += ["num_attention_heads", "num_key_value_heads", "max_position_embeddings"]
SIZES += ["rope_theta", "rms_norm_eps"]


def main():
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description="Say whether a folder can be run, or what is wrong with it.",
        epilog="Example: python -m examples.check tests/Qwen3-mini",
    )
    parser.add_argument("model", nargs="?", help="a folder (the one llm_inference.py would run)")
    folder = llm.find_model(parser.parse_args().model)
    count = check(folder)
    print(f"{folder} can be run: {count} tensors, all as config.json says", flush=True)


def load(folder, dtype=None, lazy=False, stretched_rope=False):
    """llm.load, where nothing is wrong; else a ValueError that says what."""
    check(folder, stretched_rope)
    return llm.load(folder, dtype, lazy, stretched_rope)


def check(folder, stretched_rope=False):
    """The number of tensors. ValueError: what is wrong, in one sentence with the way out."""
    folder = Path(folder)
    read(folder / "config.json")
    try:
        config = llm.read_config(folder, stretched_rope)
    except ValueError as error:
        raise ValueError(f"{folder}/{error}") from None
    except (KeyError, TypeError):  # head_dim is missing, and so is what it follows from
        config = json.loads((folder / "config.json").read_bytes())
    missing = {key: config.get(key) for key in SIZES if not is_number(config.get(key))}
    if missing:
        raise ValueError(f"{folder}/config.json has {missing}: only dense Qwen3 can be run")
    count = check_weights(folder, tensor_shapes(config))
    read(folder / "tokenizer.json", Tokenizer.from_file)
    for name in ("generation_config.json", "tokenizer_config.json"):
        if (folder / name).exists():
            read(folder / name)
    return count


def is_number(value):
    return isinstance(value, int | float)


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
        shapes[f"{block}.input_layernorm"] = (D,)  # RMSNorm before attention
        shapes[f"{block}.self_attn.q_proj"] = (queries, D)  # to queries
        shapes[f"{block}.self_attn.k_proj"] = (keys, D)  # to keys
        shapes[f"{block}.self_attn.v_proj"] = (keys, D)  # to values
        shapes[f"{block}.self_attn.q_norm"] = (d,)  # RMSNorm of a query
        shapes[f"{block}.self_attn.k_norm"] = (d,)  # RMSNorm of a key
        shapes[f"{block}.self_attn.o_proj"] = (D, queries)  # from all heads back to D
        shapes[f"{block}.post_attention_layernorm"] = (D,)  # RMSNorm before feed-forward
        shapes[f"{block}.mlp.gate_proj"] = (F, D)  # the gate
        shapes[f"{block}.mlp.up_proj"] = (F, D)  # what the gate lets through
        shapes[f"{block}.mlp.down_proj"] = (D, F)  # back to D
    shapes["model.norm"] = (D,)  # RMSNorm before the head
    if not config["tie_word_embeddings"]:  # where tied, the embedding serves here, too
        shapes["lm_head"] = (config["vocab_size"], D)  # the last product: a score per token
    return shapes


def check_weights(folder, shapes):
    """Compare what the files hold with the table, and return the number of tensors. Nothing but the
    files' headers is read: MLX is lazy.
    """
    index = folder / "model.safetensors.index.json"
    place = read(index)["weight_map"] if index.exists() else {}
    named = sorted({folder / file for file in place.values()})
    weights = {}
    origin = {}
    for file in sorted(folder.glob("model*.safetensors")) or named or [index.with_suffix("")]:
        tensors = read(file, mx.load)
        for name in tensors.keys() & weights.keys():
            raise ValueError(f"{name} is both in {origin[name]} and in {file}: remove one of them")
        weights |= tensors
        origin |= dict.fromkeys(tensors, file)
    found = {name: f"missing {place.get(f'{name}.weight', '')}".strip() for name in shapes}
    for name in weights:
        stem = re.sub(r"\.(weight|scales|biases)$", "", name)
        if stem not in shapes and stem != "lm_head":  # the 0.6B has one although it needs none
            found[stem] = "unknown"
        elif stem in shapes:
            found[stem] = shape_of(weights, stem, shapes[stem][-1])
    wrong = [name for name in found if found[name] != shapes.get(name)]
    if wrong:
        first = "; ".join(f"{name} is {found[name]}, not {shapes.get(name)}" for name in wrong[:3])
        raise ValueError(f"{folder}: {len(wrong)} tensors do not fit config.json: {first}")
    return len(weights)


def shape_of(weights, name, width):
    """The shape of a stored matrix, unpacked; or what is wrong with it."""
    try:
        W, packing = llm.matrix(weights, name, width)
        W = mx.dequantize(W, **packing) if packing else W
    except (KeyError, TypeError, ValueError) as error:
        return f"stored in an unknown way ({error})"
    return W.shape if mx.issubdtype(W.dtype, mx.floating) else W.dtype


def read(path, parse=None):
    """What parse makes of a file, else its JSON. ValueError: what is wrong with the file."""
    if not path.is_file():
        parts = "config.json, tokenizer.json and model.safetensors"
        way = "python -m examples.download NAME gets one of huggingface.co"
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


if __name__ == "__main__":
    llm.run(main)
