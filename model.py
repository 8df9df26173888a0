"""The network: GPTConfig, Block and GPT, with two faces chosen by the configuration.

The GPT-2 of nanoGPT (LayerNorm, GELU, learned positions, tied head) is the default; RMSNorm, rotary positions, QK-norm,
ReLU^2 or SwiGLU, grouped queries, an untied head and a logit softcap make the modern one.

Letters: B batch, T sequence, C embedding, H query heads, G key/value heads, D head dim, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from attention import attention
from loss import cap_logits, linear_cross_entropy


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """What the network is; everything about how it is trained is in config.Config."""

    vocab_size: int = 0
    """Rows of the embedding; 0 takes the tokenizer's vocabulary."""
    block_size: int = 256
    """Longest context, in tokens."""
    n_layer: int = 6
    n_head: int = 6
    n_kv_head: int | None = None
    """Key/value heads, a divisor of n_head (grouped queries); None means n_head."""
    n_embd: int = 384
    """Width of the residual stream; the head dim is n_embd / n_head."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    position: Literal["learned", "rope"] = "learned"
    mlp: Literal["gelu", "relu2", "swiglu"] = "gelu"
    qk_norm: bool = False
    """Normalise queries and keys of each head to unit RMS before their product."""
    bias: bool = False
    """Biases in linear layers and LayerNorm, as GPT-2 has them; slightly better and faster without."""
    tie_head: bool = True
    """Share the token embedding's weight with the output head."""
    logit_softcap: float | None = None
    """Logits become cap * tanh(logits / cap); None = off."""
    dropout: float = 0.0
    attention: Literal["auto", "hopper", "triton", "sdpa", "reference"] = "auto"
    """Implementation of attention(); auto takes our kernels where they run."""

    def __post_init__(self):
        if min(self.n_layer, self.n_head, self.n_embd, self.block_size) < 1 or self.vocab_size < 0:
            raise ValueError(
                f"n_layer={self.n_layer}, n_head={self.n_head}, n_embd={self.n_embd} and block_size={self.block_size} "
                f"must be at least 1, vocab_size={self.vocab_size} at least 0"
            )
        if self.n_embd % self.n_head or self.head_dim % 8 or self.head_dim > 256:
            raise ValueError(
                f"n_embd={self.n_embd} with n_head={self.n_head} must give a head dim that is a multiple of 8 "
                f"up to 256, not {self.n_embd / self.n_head:g}; change n_head"
            )
        if self.kv_heads < 1 or self.n_head % self.kv_heads:
            raise ValueError(
                f"n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}; "
                "n_kv_head=1 gives multi-query attention"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be in [0, 1)")
        if self.logit_softcap is not None and self.logit_softcap <= 0:
            raise ValueError(f"logit_softcap={self.logit_softcap} must be positive; None turns it off")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def kv_heads(self):
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def attention_impl(self):
        """What attention() is asked for. With dropout only the portable kernels train: to evaluate by them too saves
        compiling and checking others."""
        return "portable" if self.attention == "auto" and self.dropout > 0 else self.attention


class Cache:
    """Keys and values of the tokens seen so far, for generation: room for block_size tokens of `batch` rows."""

    def __init__(self, config, batch, device=None, dtype=None):
        shape = (config.n_layer, batch, config.block_size, config.kv_heads, config.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, layer, k, v):
        """Store k, v [B, T, G, D] behind the first `length` tokens and return all up to there; advance() moves on."""
        end = self.length + k.shape[1]
        self.k[layer, :, self.length : end] = k
        self.v[layer, :, self.length : end] = v
        return self.k[layer, :, :end], self.v[layer, :, :end]

    def advance(self, tokens):
        self.length += tokens


class RMSNorm(nn.RMSNorm):
    """In float32, as autocast computes LayerNorm."""

    def forward(self, x):
        return super().forward(x.float()).type_as(x)


def make_norm(config):
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd)
    return nn.LayerNorm(config.n_embd, bias=config.bias)


def rotary_angles(config):
    """cos and sin [T, 1, D / 2] of position * 10000^(-2i / D), in float32 (Su et al. 2021, RoFormer)."""
    half = config.head_dim // 2
    frequency = 10000.0 ** (-torch.arange(half) / half)
    angle = torch.outer(torch.arange(config.block_size), frequency)[:, None, :]
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Turn the pairs (x_i, x_{i + D/2}) of [B, T, heads, D] by their angles."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer = config, layer
        self.qkv = nn.Linear(config.n_embd, (config.n_head + 2 * config.kv_heads) * config.head_dim, bias=config.bias)
        self.qkv.weight.parts = [heads * config.head_dim for heads in (config.n_head, config.kv_heads, config.kv_heads)]
        self.project = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, rotary, cache, lse):
        B, T, C = x.shape
        config = self.config
        heads = (config.n_head, config.kv_heads, config.kv_heads)
        q, k, v = self.qkv(x).view(B, T, -1, config.head_dim).split(heads, dim=2)  # slices, no copies
        if config.qk_norm:
            q, k = (F.rms_norm(z, (config.head_dim,)) for z in (q, k))
        if rotary is not None:
            q, k = (rotate(z, *rotary) for z in (q, k))
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        dropout = config.dropout if self.training else 0.0
        if lse is None:
            y = attention(q, k, v, causal=True, dropout=dropout, impl=config.attention_impl)  # [B, T, H, D]
        else:  # by whichever implementation has it: SDPA does not
            y, total = attention(q, k, v, causal=True, dropout=dropout, return_lse=True)
            lse.append(total.amax())
        return self.drop(self.project(y.reshape(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.kind = config.mlp
        hidden = 4 * config.n_embd
        if config.mlp == "swiglu":  # three matrices instead of two: two thirds of the width keep the size
            hidden = math.ceil(hidden * 2 / 3 / 64) * 64
            self.gate = nn.Linear(config.n_embd, hidden, bias=config.bias)
        self.expand = nn.Linear(config.n_embd, hidden, bias=config.bias)
        self.project = nn.Linear(hidden, config.n_embd, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x):
        hidden = self.expand(x)
        if self.kind == "swiglu":
            hidden = F.silu(self.gate(x)) * hidden
        elif self.kind == "relu2":
            hidden = F.relu(hidden).square()
        else:
            hidden = F.gelu(hidden)
        return self.drop(self.project(hidden))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.norm_1 = make_norm(config)
        self.attention = Attention(config, layer)
        self.norm_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x, rotary, cache, lse):
        x = x + self.attention(self.norm_1(x), rotary, cache, lse)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        if config.vocab_size < 1:
            raise ValueError(f"vocab_size={config.vocab_size} must be at least 1; take the tokenizer's n_vocab")
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        if config.position == "learned":
            self.embed_position = nn.Embedding(config.block_size, config.n_embd)
        else:
            cos, sin = rotary_angles(config)
            self.register_buffer("rotary_cos", cos, persistent=False)
            self.register_buffer("rotary_sin", sin, persistent=False)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_head:
            self.head.weight = self.embed.weight
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("project.weight"):  # 2 n_layer branches add up in the residual stream (GPT-2, section 2.3)
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))

    @staticmethod
    def _initialise(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens, targets=None, cache=None, lse=None):
        """Logits [B, T, V] of tokens [B, T]; with targets [B, T] their mean cross-entropy in nats instead.

        With a cache, tokens follow the cache.length tokens already in it; it must have room for them. To a list `lse`
        each layer appends the largest log-sum-exp [] of its attention rows: its largest logit is at most that, and at
        most ln T below it.
        """
        T = tokens.shape[1]
        start = 0 if cache is None else cache.length
        if start + T > self.config.block_size:
            raise ValueError(
                f"{start} + {T} tokens do not fit in block_size={self.config.block_size}; crop the context"
            )
        x = self.embed(tokens)
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16:
            x = x.bfloat16()  # the residual stream: half the traffic of every norm. float16 could overflow
        rotary = None
        if self.config.position == "learned":
            x = x + self.embed_position.weight[start : start + T].type_as(x)
        else:
            rotary = self.rotary_cos[start : start + T], self.rotary_sin[start : start + T]
        x = self.drop(x)
        for block in self.blocks:
            x = block(x, rotary, cache, lse)
        if cache is not None:
            cache.advance(T)
        hidden = self.norm(x).type_as(x)
        if targets is not None:
            return linear_cross_entropy(
                hidden.flatten(0, 1), self.head.weight, targets.flatten(), self.config.logit_softcap
            )
        return cap_logits(self.head(hidden).float(), self.config.logit_softcap)

    def parameter_groups(self, weight_decay, **of_blocks):
        """Optimizer groups: matrices and embeddings decay, norms and biases do not.

        of_blocks: options of a third group, of the blocks' matrices, which there is only with them.
        """
        parameters = [p for p in self.parameters() if p.requires_grad]
        inner = {p for p in self.blocks.parameters() if p.dim() == 2} if of_blocks else set()
        outer = [p for p in parameters if p not in inner]
        groups = [
            {"params": [p for p in outer if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in outer if p.dim() < 2], "weight_decay": 0.0},
        ]
        if of_blocks:
            groups.append({"params": [p for p in parameters if p in inner], "weight_decay": weight_decay, **of_blocks})
        return groups

    def flops_per_token(self):
        """Floating-point operations of forward and backward per token at full context, causal attention at half.

        6 per weight of a matmul (embedding look-ups cost none, the head does) and 12 L C T / 2 for attention's products
        (Chowdhery et al. 2022, PaLM, appendix B, halved).
        """
        config = self.config
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * weights + 6 * config.n_layer * config.n_embd * config.block_size
