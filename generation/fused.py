"""GPT.hidden() and GPT.logits() for one new token per row, in few kernels, for a GPU.

A step of few rows mostly waits for its kernels to start. A block takes seven here: four linear layers with the norm,
activation and residual around them, one that stores keys and values, and two of decode().
"""

import torch

from generation.heads import store_heads
from generation.linear import linear


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
