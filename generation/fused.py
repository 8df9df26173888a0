"""GPT.hidden() and GPT.logits() for one new token per row, in few kernels, for a GPU.

A step of few rows mostly waits for its kernels to start. A block takes seven here: four linear layers with the norm,
activation and residual around them, one that stores keys and values, and two of decode().
"""

from dataclasses import fields

import torch

from generation.heads import store_heads
from generation.linear import linear

# Options of GPTConfig that may have any value here, and values of others. One that is not listed is not computed.
ANY = ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "norm_weight", "norm_eps", "rope_theta",
       "mlp", "qk_norm", "bias", "tie_head", "logit_softcap", "window", "dropout", "mask_documents", "end_of_text",
       "attention")  # fmt: skip
VALUES = dict(norm=["layernorm", "rmsnorm"], position=["learned", "rope"], embed_norm=[False], embed_skip=[False],
              value_residual=[False], key_offset=[False])  # fmt: skip


def can_fuse(config):
    """Whether fused_logits() computes the network of a GPTConfig."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    known = all(name in ANY or value in VALUES.get(name, []) for name, value in values.items())
    return known and not (config.qk_norm and config.norm_eps > 0)


def fused_logits(model, tokens, view):
    """Float32 logits [B, V] of a GPT after tokens [B], which continue the rows of a generation.cache.View."""
    config, slots, rotary = model.config, view.positions[:, 0], None
    x = model.embed(tokens)
    if config.position == "learned":
        x = x + model.embed_position(slots)
    else:
        rotary = model.rotary_cos, model.rotary_sin
    for block, layer in zip(model.blocks, view.layers, strict=True):
        attention, mlp = block.attention, block.mlp
        qkv = linear(x, attention.qkv, norm=block.norm_1)
        q = store_heads(qkv, layer.k, layer.v, slots, rotary, config.qk_norm)
        x = linear(layer.decode(q, attention.window).flatten(1), attention.project, residual=x)
        hidden = linear(x, mlp.expand, norm=block.norm_2, activation=config.mlp, gate=getattr(mlp, "gate", None))
        x = linear(hidden, mlp.project, residual=x)
    return linear(x, model.head, norm=model.norm, softcap=config.logit_softcap, dtype=torch.float32)
