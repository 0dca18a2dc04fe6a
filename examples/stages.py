"""What are the stages from ids to logits, and how are their results watched? For compare.py.

Neither program is changed: the file's functions, and the modules of transformers, are wrapped
while they run, and what passes through is kept under the same names for both.
"""

import functools
from unittest import mock

import mlx.core as mx

import llm_inference as llm

# Name in the checkpoint, or here -> what it is, and what is usually wrong where it differs first.
STAGES = {
    "embed_tokens": ("embedding", "another row of the table; a factor on the rows"),
    "input_layernorm": ("norm before attention", "eps outside the root; ffn added wrongly"),
    "q_proj": ("q after projection", "q_proj of another layer, or transposed"),
    "q_norm": ("q after norm", "no QK-norm; not head by head; the weight of k"),
    "k_proj": ("k after projection", "k_proj of another layer, or transposed"),
    "k_norm": ("k after norm", "no QK-norm; not head by head; the weight of q"),
    "v_proj": ("v after projection", "v_proj of another layer, or transposed"),
    "q_turned": ("q after rotation", "pairs (2j, 2j + 1), not (j, j + d/2); theta; positions"),
    "k_turned": ("k after rotation", "pairs (2j, 2j + 1), not (j, j + d/2); theta; positions"),
    "o_proj": ("attention out", "mask; 1 / sqrt(d); cache; q beside the wrong KV heads; o_proj"),
    "post_attention_layernorm": ("norm before ffn", "eps; attention added wrongly"),
    "gate_proj": ("gate", "gate and up swapped, or those of another layer"),
    "up_proj": ("up", "gate and up swapped, or those of another layer"),
    "down_proj": ("ffn out", "gate and up swapped; another function than silu; down_proj"),
    "norm": ("final norm", "eps; another norm's weight; ffn added wrongly"),
    "lm_head": ("logits", "embedding in place of lm_head: see tie_word_embeddings"),
}


def record_port(ids, weights, config):
    """place -> rows: all that llm_inference computes on the way to the logits of all ids."""
    record = {}
    names = {id(weights[name]): name for name in weights}
    project = llm.queries_keys_values

    def keep(place, x):  # (L, ...) or (heads, L, d)
        rows = x.swapaxes(0, 1) if x.ndim == 3 else x
        rows = rows.reshape(len(rows), -1).astype(mx.float32)
        record[place] = mx.concatenate([record[place], rows]) if place in record else rows
        return x

    def watch(function, place):
        return lambda *arguments: keep(place(*arguments), function(*arguments))

    def keep_turned(x, weights, config, layer, offset):
        q, k, v = project(x, weights, config, layer, offset)
        return keep(f"{layer}.q_turned", q), keep(f"{layer}.k_turned", k), v

    with mock.patch.multiple(
        llm,
        embed=watch(llm.embed, lambda *arguments: "embed_tokens"),
        linear=watch(llm.linear, lambda x, weights, name: place_of(name, head="lm_head")),
        rms_norm=watch(
            llm.rms_norm, lambda x, weight, eps: place_of(names.get(id(weight), "other"))
        ),
        queries_keys_values=keep_turned,
    ):
        cache = llm.make_cache(weights, config, len(ids))
        for start, end in ((0, len(ids) - 1), (len(ids) - 1, len(ids))):  # a prompt, then a step
            x = llm.hidden_states(ids[start:end], weights, config, cache, start)
            llm.head(x, weights, config)
    return record


def record_original(ids, folder, dtype):
    """The same of transformers, which reads all ids at once, without a cache."""
    import torch
    from transformers.models.qwen3 import modeling_qwen3
    from transformers.utils import logging

    logging.disable_progress_bar()
    record = {}
    attend = modeling_qwen3.eager_attention_forward

    def keep(place, x):  # (1, L, ...)
        record[place] = mx.array(x[0].reshape(x.shape[1], -1).float().numpy())

    def keep_output(place, module, inputs, output):
        keep(place, output)

    def keep_turned(module, q, k, *others, **settings):
        keep(f"{module.layer_idx}.q_turned", q.transpose(1, 2))
        keep(f"{module.layer_idx}.k_turned", k.transpose(1, 2))
        return attend(module, q, k, *others, **settings)

    model = modeling_qwen3.Qwen3ForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    for name, module in model.named_modules():
        if name.rpartition(".")[-1] in STAGES:
            module.register_forward_hook(functools.partial(keep_output, place_of(name)))
    with torch.no_grad(), mock.patch.object(modeling_qwen3, attend.__name__, keep_turned):
        model(torch.tensor([ids]), use_cache=False)
    return record


def place_of(name, head=None):  # model.layers.2.self_attn.q_proj.weight -> 2.q_proj
    parts = name.removesuffix(".weight").split(".")
    return f"{parts[2]}.{parts[-1]}" if "layers" in parts else head or parts[-1]
