"""Checkpoints with random weights, in the published file layout, for tests and benchmarks: nothing is downloaded."""

import json
import shutil
from pathlib import Path

import mlx.core as mx

MINI = Path(__file__).parent / "Qwen3-mini"
TOKENIZER_FILES = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
FULL_SIZE = dict(
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151936,
    max_position_embeddings=40960,
)


def make_config(**changes):
    """A small Qwen3 configuration in the older layout; a change to None removes the key."""
    config = (
        dict(
            architectures=["Qwen3ForCausalLM"],
            model_type="qwen3",
            hidden_act="silu",
            attention_bias=False,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=96,
            vocab_size=2048,
            rms_norm_eps=1e-6,
            rope_theta=1000000,
            rope_scaling=None,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            use_sliding_window=False,
            eos_token_id=2,
            torch_dtype="float32",
        )
        | changes
    )
    return {
        key: value for key, value in config.items() if value is not None or key == "rope_scaling"
    }


def random_weights(config, dtype=mx.float32, seed=0):
    """Normal weights of spread 1/sqrt(inputs) (so that depth neither kills nor blows up the signal) and norms around 1."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim") or D // H
    matrices = {
        "self_attn.q_proj": (H * d, D),
        "self_attn.k_proj": (K * d, D),
        "self_attn.v_proj": (K * d, D),
        "self_attn.o_proj": (D, H * d),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    norms = {
        "input_layernorm": D,
        "post_attention_layernorm": D,
        "self_attn.q_norm": d,
        "self_attn.k_norm": d,
    }
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (V, D)
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"model.layers.{layer}.{name}.weight": (size,) for name, size in norms.items()}
    mx.random.seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = mx.random.normal(shape)
        array = 1 + 0.3 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
        weights[name] = array.astype(dtype)
        mx.eval(weights[name])
    return weights


def write_checkpoint(folder, config, weights=None, dtype=mx.float32, seed=0, tokenizer_from=MINI):
    """Write config.json, model.safetensors and the tokenizer's files; returns the folder as a Path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = random_weights(config, dtype, seed) if weights is None else weights
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    for name in TOKENIZER_FILES:
        if tokenizer_from and (Path(tokenizer_from) / name).exists():
            shutil.copyfile(Path(tokenizer_from) / name, folder / name)
    return folder


def quantize(weights, config, bits=4, group_size=64, choose=None):
    """Quantize every matrix as mlx-lm's converter does, embedding included. `choose(name)` may give (bits, group_size)
    or None (stay as is) for one matrix. Returns (weights, config) as such a checkpoint carries them.
    """
    packed, plan = {}, {"group_size": group_size, "bits": bits}
    for key, array in weights.items():
        name = key.removesuffix(".weight")
        own = choose(name) if choose else (bits, group_size)
        if array.ndim != 2 or own is None:
            packed[key] = array
            continue
        packed[f"{name}.weight"], packed[f"{name}.scales"], packed[f"{name}.biases"] = mx.quantize(
            array, group_size=own[1], bits=own[0]
        )
        if own != (bits, group_size):
            plan[name] = {"group_size": own[1], "bits": own[0]}
    return packed, config | {"quantization": plan, "quantization_config": plan}
