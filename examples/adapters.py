"""What is an adapter? Two thin matrices beside a matrix W, for lora.py and whoever reads its files.

y = x W^T + scale * x A B, with A (in, r) and B (r, out). They lie in the same flat dict as W, under
its name. Paper: LoRA, arXiv 2106.09685.
"""

import mlx.core as mx

from examples.check import tensor_shapes

PLACES = [f"self_attn.{kind}_proj" for kind in "qkvo"]
PLACES += [f"mlp.{kind}_proj" for kind in ("gate", "up", "down")]


def make_adapters(config, rank, layers, places, seed):
    """A is random. B is zero, so that the model is at first what it was."""
    adapters = {}
    key = mx.random.key(seed)
    shapes = tensor_shapes(config)
    for layer in range(config["num_hidden_layers"] - layers, config["num_hidden_layers"]):
        for place in places:
            name = f"model.layers.{layer}.{place}"
            rows, columns = shapes[name]
            key, own_key = mx.random.split(key)
            spread = columns**-0.5
            A = mx.random.uniform(low=-spread, high=spread, shape=(columns, rank), key=own_key)
            adapters[f"{name}.lora_a"] = A
            adapters[f"{name}.lora_b"] = mx.zeros((rank, rows))
    return adapters


def with_adapters(plain_linear, scale):
    """A function to take the place of llm.linear, which the file looks up at each call."""

    def linear(x, weights, name):  # (L, in) -> (L, out)
        y = plain_linear(x, weights, name)
        if f"{name}.lora_a" not in weights:
            return y
        added = x @ weights[f"{name}.lora_a"] @ weights[f"{name}.lora_b"]
        return y + (scale * added).astype(y.dtype)

    return linear


def fuse(weights, adapters, scale):
    """W + scale * (A B)^T: one matrix again, as quick as before."""
    fused = dict(weights)
    for name in adapters:
        if name.endswith(".lora_a"):
            stem = name.removesuffix(".lora_a")
            added = (scale * adapters[f"{stem}.lora_b"].T) @ adapters[name].T
            W = weights[f"{stem}.weight"]
            fused[f"{stem}.weight"] = W + added.astype(W.dtype)
    return fused
