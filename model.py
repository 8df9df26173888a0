"""The network: GPTConfig, Block and GPT.

The default is nanoGPT's GPT-2. Options turn it into a modern network: RMSNorm, rotary positions, ReLU^2 and so on.
Letters: B batch, T sequence, C embedding, H query heads, G key/value heads, D head dim, V vocabulary.
"""

import hashlib
import math
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import attention, attention_qkv
from errors import UserError, require
from kernels.activation import ACTIVATIONS
from kernels.documents import find_documents
from kernels.dropout import Dropout
from kernels.loss import head_logits, head_loss
from kernels.mlp import mlp

LAYERNORM_EPSILON, RMSNORM_EPSILON = 1e-5, torch.finfo(torch.float32).eps


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The network's options; training.config.Config adds those of a training run."""

    # network
    vocab_size: int = 0
    """Rows of the embedding; the tokenizer's vocabulary size if that is larger."""
    block_size: int = 256
    """Longest context, in tokens."""
    n_layer: int = 6
    """Number of blocks."""
    n_head: int = 6
    """Query heads."""
    n_kv_head: int | None = None
    """Key/value heads, a divisor of n_head (grouped-query attention); None means n_head."""
    n_embd: int = 384
    """Width of the residual stream; the head dim is n_embd / n_head."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before each attention and MLP, and before the head."""
    norm_weight: bool = True
    """Learned weights in the norms."""
    norm_eps: float = 0.0
    """Added to the variance or mean square in all norms; 0 means PyTorch's, 1e-5 in LayerNorm and 1.2e-7 in RMSNorm."""
    position: Literal["learned", "rope"] = "learned"
    """Learned position embeddings, or rotary ones (RoPE)."""
    rope_theta: float = 10000.0
    """Base of RoPE's wavelengths."""
    mlp: Literal[*ACTIVATIONS, "swiglu"] = "gelu"
    """Activation of the MLP: gelu_tanh is GPT-2's approximation of GELU, relu2 is ReLU squared."""
    qk_norm: bool = False
    """Normalise the queries and keys of each head to unit RMS."""
    bias: bool = False
    """Biases in linear layers and LayerNorm, as in GPT-2; nanoGPT trains without them."""
    tie_head: bool = True
    """Share one weight between the token embedding and the output head."""
    logit_softcap: float | None = None
    """Replace logits by cap * tanh(logits / cap); None = off."""
    embed_norm: bool = False
    """Normalise the embedding of each token to unit RMS, as nanochat does."""
    embed_skip: bool = False
    """A block gets (1 + a) x + b e, not x; e is the token's embedding, a and b are learned and begin at 0."""
    value_residual: bool = False
    """Mix the values of attention with the first block's, by learned shares that begin at 1/2 (Zhou et al. 2024)."""
    key_offset: bool = False
    """In half of each head's channels, use the key of the token before, without rotary positions (modded-nanogpt)."""
    window: int | None = None
    """Keys that a query sees, its own included, in three of four blocks; the others see all. None: no limit."""
    dropout: float = 0.0
    """Probability of dropout, for embeddings, attention weights and residual branches."""
    mask_documents: bool = False
    """Attention does not cross the end of a document, and positions restart there."""
    end_of_text: int | None = None
    """Id of the token that ends a document; None means the tokenizer's, if it has one."""
    attention: Literal["auto", "hopper", "triton", "sdpa", "reference"] = "auto"
    """Implementation of attention(); auto takes our kernels where they run, else PyTorch's."""

    def __post_init__(self):
        for field in fields(GPTConfig):
            value, kind = getattr(self, field.name), field.type
            right = value in get_args(kind) if get_origin(kind) is Literal else isinstance(value, kind | int)
            require(right, f"{field.name}={value!r} must be {kind if get_args(kind) else kind.__name__}")
        require(self.position == "rope" or not self.key_offset, "key_offset=True needs RoPE; add --position rope")
        rule = f"n_embd={self.n_embd} / n_head={self.n_head} is the head dim, which must be a multiple of 8 up to 256"
        require(self.n_embd % self.n_head == 0 and self.head_dim % 8 == 0 and self.head_dim <= 256, rule)
        require(self.n_head % self.kv_heads == 0, f"n_head={self.n_head} is no multiple of n_kv_head={self.n_kv_head}")
        require(self.logit_softcap is None or self.logit_softcap > 0, "logit_softcap must be positive, or None (off)")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def kv_heads(self):
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def mlp_width(self):
        # swiglu has three matrices instead of two: two thirds of the width keep the parameter count
        return math.ceil(4 * self.n_embd * 2 / 3 / 64) * 64 if self.mlp == "swiglu" else 4 * self.n_embd


class RMSNorm(nn.RMSNorm):
    """RMSNorm, computed in float32 whatever the dtype of x."""

    def forward(self, x):
        weight = None if self.weight is None else self.weight.type_as(x)  # of one dtype, they take one kernel
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def make_norm(config):
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd, config.norm_eps or RMSNORM_EPSILON, config.norm_weight)
    return nn.LayerNorm(config.n_embd, config.norm_eps or LAYERNORM_EPSILON, config.norm_weight, config.bias)


def rotary_angles(config):
    """cos and sin [block_size, 1, R / 2] of position * theta^(-2i / R), in float32 (Su et al. 2021, RoFormer)."""
    half = config.head_dim // (4 if config.key_offset else 2)  # R / 2, of the R channels that are rotated
    frequency = config.rope_theta ** (-torch.arange(half, device="cpu") / half)  # the same bits for any device
    angle = torch.outer(torch.arange(config.block_size, device="cpu"), frequency)[:, None, :]
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotate the pairs (x_i, x_{i + R/2}) of the first R channels of x [B, T, heads, D] by their angles."""
    R = 2 * cos.shape[-1]
    a, b = x[..., :R].float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., R:]), dim=-1).type_as(x)


def offset_keys(k, before, is_first):
    """k [B, T, heads, D] with the second half of `before`, the keys of the tokens before, but where is_first."""
    return torch.cat((k.chunk(2, dim=-1)[0], torch.where(is_first, k, before).chunk(2, dim=-1)[1]), dim=-1)


@dataclass
class Shared:
    """What the blocks of a forward pass need besides x."""

    rotary: tuple | None  # cos and sin of the positions
    documents: Tensor | None  # cu_seqlens of the batch's documents, packed in one row
    layers: list | None  # of the cache, in generation
    first_v: Tensor | None = None  # the first block's values, which that block sets


class Attention(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.config, self.index, self.is_first = config, index, index == 0
        self.heads, self.head_dim = (config.n_head, config.kv_heads, config.kv_heads), config.head_dim  # of q, k and v
        self.qkv = nn.Linear(config.n_embd, sum(self.heads) * self.head_dim, bias=config.bias)
        self.project = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.window = None if index % 4 == 3 else config.window
        if config.value_residual and index > 0:
            self.value_mix = nn.Parameter(torch.empty(1))  # of the first block's values, minus 1/2

    def forward(self, x, shared):
        (B, T, C), config = x.shape, self.config
        packed = {} if shared.documents is None else dict(cu_seqlens=shared.documents, max_seqlen=T)
        rows = (1, B * T) if packed else (B, T)  # documents are packed in one row
        dropout = config.dropout if self.training else 0.0
        options = dict(window=self.window, dropout=dropout, impl=config.attention, **packed)
        qkv = self.qkv(x)
        if not (shared.rotary or shared.layers or config.qk_norm or config.value_residual):
            y = attention_qkv(qkv.view(*rows, -1), config.n_head, config.kv_heads, **options)
            return self.project(y.reshape(B, T, C))
        q, k, v = qkv.view(B, T, -1, self.head_dim).split(self.heads, dim=2)  # slices, no copies
        if config.value_residual and self.is_first:
            shared.first_v = v
        elif config.value_residual:
            v = v.lerp(shared.first_v, (0.5 + self.value_mix).type_as(v))
        if config.qk_norm:
            q, k = (F.rms_norm(z, (self.head_dim,), eps=config.norm_eps or None) for z in (q, k))
        if shared.rotary:
            q, k = (rotate(z, *shared.rotary) for z in (q, k))
        if config.key_offset and T > 1:  # for a single token, the cache does it
            k = offset_keys(k, k.roll(1, dims=1), shared.rotary[1][..., :1] == 0)  # sin is 0 only at position 0
        if shared.layers:
            y = shared.layers[self.index].attend(q, k, v, self.window)
        else:
            q, k, v = (z.reshape(*rows, -1, self.head_dim) for z in (q, k, v))
            y = attention(q, k, v, **options)  # [B, T, H, D]
        return self.project(y.reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.kind = config.mlp
        if config.mlp == "swiglu":
            self.gate = nn.Linear(config.n_embd, config.mlp_width, bias=config.bias)
        self.expand = nn.Linear(config.n_embd, config.mlp_width, bias=config.bias)
        self.project = nn.Linear(config.mlp_width, config.n_embd, bias=config.bias)

    def forward(self, x):
        if self.kind == "swiglu":
            return self.project(F.silu(self.gate(x)) * self.expand(x))
        return mlp(x, self.expand, self.project, self.kind)


class Block(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.norm_1 = make_norm(config)
        self.attention = Attention(config, index)
        self.norm_2 = make_norm(config)
        self.mlp = MLP(config)
        self.drop = Dropout(config.dropout)

    def forward(self, x, shared):
        x = x + self.drop(self.attention(self.norm_1(x), shared))
        x = x + self.drop(self.mlp(self.norm_2(x)))
        return x


class SkipInitialisation(torch.overrides.TorchFunctionMode):
    """Skips torch.nn.init, which takes longer than reading weights."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        skip = getattr(function, "__module__", None) == "torch.nn.init"
        return None if skip else function(*args, **kwargs or {})


class GPT(nn.Module):
    """The network of a GPTConfig; seed: for its initial weights, which are arbitrary if it is None."""

    def __init__(self, config: GPTConfig, seed=0):
        super().__init__()
        self.config = config
        with SkipInitialisation():
            self.embed = nn.Embedding(config.vocab_size, config.n_embd)
            if config.position == "learned":
                self.embed_position = nn.Embedding(config.block_size, config.n_embd)
            else:
                for name, angle in zip(("rotary_cos", "rotary_sin"), rotary_angles(config), strict=True):
                    self.register_buffer(name, angle.to(self.embed.weight.device), persistent=False)
            self.drop = Dropout(config.dropout)
            self.blocks = nn.ModuleList(Block(config, index) for index in range(config.n_layer))
            if config.embed_skip:
                self.skips = nn.Parameter(torch.empty(2 * config.n_layer))  # a and b of each block
            self.norm = make_norm(config)
            self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_head:
            self.head.weight = self.embed.weight
        if seed is not None:
            self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed):
        """Draw GPT-2's initial weights. Each depends only on the seed, its name, its shape and the kind of device."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                # 2 n_layer branches add up in the residual stream (GPT-2, section 2.3)
                branches = 2 * self.config.n_layer if name.endswith("project.weight") else 1
                number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8])
                generator = torch.Generator(parameter.device).manual_seed(number)
                parameter.normal_(std=0.02 / math.sqrt(branches), generator=generator)

    def forward(self, tokens, targets=None):
        """Logits [B, T, V] of tokens [B, T]; with targets [B, T], the mean cross-entropy of those not -100."""
        hidden = self.hidden(tokens)
        if targets is None:
            return self.logits(hidden)
        return head_loss(hidden.flatten(0, 1), self.head, targets.flatten(), self.config.logit_softcap)

    def hidden(self, tokens, cache=None):
        """Hidden states [B, T, C] of tokens [B, T]. cache: a View of generation's Cache, whose rows they continue."""
        T, config, documents = tokens.shape[1], self.config, None
        if T > config.block_size:
            raise UserError(f"{T} tokens do not fit in block_size={config.block_size}; crop the context")
        positions, layers = cache or (slice(T), None)  # positions: [B, T] or a slice
        if config.mask_documents and cache is None:
            documents, positions = find_documents(tokens, config.end_of_text)
        x, rotary, kind = self.embed(tokens), None, tokens.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16:
            x = x.bfloat16()  # halves the memory traffic of the residual stream; float16 could overflow
        if config.position == "learned":
            x = x + self.embed_position.weight[positions].type_as(x)
        else:
            rotary = self.rotary_cos[positions], self.rotary_sin[positions]
        x = embedded = self.drop(F.rms_norm(x, x.shape[-1:], eps=config.norm_eps or None) if config.embed_norm else x)
        shared = Shared(rotary, documents, layers)
        for index, block in enumerate(self.blocks):
            if config.embed_skip:
                a, b = self.skips[2 * index : 2 * index + 2].float().split(1)
                x = ((1 + a) * x + b * embedded).type_as(x)
            x = block(x, shared)
        return self.norm(x).type_as(x)

    def logits(self, hidden):
        """Float32 logits [..., V] of hidden states [..., C]."""
        return head_logits(hidden, self.head, self.config.logit_softcap)
