"""GPT.hidden() and GPT.logits() for one new token per row, in few kernels, for a GPU.

A step of few rows mostly waits for its kernels to start. A block takes seven here: four linear layers with the norm,
activation, residual and the next block's embedding skip around them, one that stores keys and values, and two of
decode().
"""

from itertools import zip_longest

import torch
import torch.nn.functional as F

from generation.heads import store_heads
from generation.linear import linear


def fused_logits(model, tokens, view):
    """Float32 logits [B, V] of a GPT after tokens [B], which continue the rows of a generation.cache.View."""
    config, slots, rotary, first = model.config, view.positions[:, 0], None, None
    x = model.embed(tokens)
    if config.position == "learned":
        x = x + model.embed_position(slots)
    else:
        rotary = model.rotary_cos, model.rotary_sin
    if config.embed_norm:
        x = F.rms_norm(x, x.shape[-1:], eps=config.norm_eps or None)
    embedded, skips, eps = x, (), None
    if config.embed_skip:
        skips = model.skips.split(2)
        x = torch.addcmul(x, x, skips[0].sum(0, True, dtype=torch.float32)).type_as(x)  # (1 + a) x + b x
    if config.qk_norm:
        eps = config.norm_eps or torch.finfo(torch.float32).eps
    for block, layer, skip in zip_longest(model.blocks, view.layers, skips[1:]):
        attention, mlp = block.attention, block.mlp
        qkv = linear(x, attention.qkv, norm=block.norm_1)
        first, mix = qkv if attention.is_first else first, getattr(attention, "value_mix", None)
        q = store_heads(qkv, layer.k, layer.v, slots, rotary, eps, first, mix, config.key_offset)
        x = linear(layer.decode(q, attention.window).flatten(1), attention.project, residual=x)
        hidden = linear(x, mlp.expand, norm=block.norm_2, activation=config.mlp, gate=getattr(mlp, "gate", None))
        x = linear(hidden, mlp.project, residual=x, embedded=embedded, skip=skip)
    return linear(x, model.head, norm=model.norm, softcap=config.logit_softcap, dtype=torch.float32)
