"""Keys and values of the tokens so far, in tensors that never move, so that a CUDA graph can use them.

Letters: B rows of the cache, S slots of a row, N rows that are prefilled, H query heads, G key/value heads, D head dim.
"""

from typing import NamedTuple

import torch

from attention import attention, decode
from model import offset_keys


class View(NamedTuple):
    """What GPT.hidden() needs of a cache: the positions [B, T] of the new tokens, and a layer for each block."""

    positions: torch.Tensor
    layers: list


class PrefillLayer(NamedTuple):
    """Layer of the cache for the first tokens of rows."""

    k: torch.Tensor  # [B, S, G, D], as v
    v: torch.Tensor
    rows: torch.Tensor  # [M], rows of the cache to fill
    sources: torch.Tensor  # [M], the row of tokens, 0 to N - 1, that fills each of these rows
    impl: str

    def attend(self, q, k, v, window):
        """Store k, v [N, T, G, D]; returns the causal attention [N, T, H, D] of q."""
        T = k.shape[1]
        self.k[self.rows, :T] = k[self.sources]
        self.v[self.rows, :T] = v[self.sources]
        return attention(q, k, v, window=window, impl=self.impl)


class DecodeLayer(NamedTuple):
    """Layer of the cache for one more token in each row."""

    k: torch.Tensor  # [B, S, G, D], as v
    v: torch.Tensor
    rows: torch.Tensor  # [B], 0 to B - 1
    slots: torch.Tensor  # [B], where the keys and values of the new tokens go
    lengths: torch.Tensor  # [B] int32, with the new tokens
    key_offset: bool  # as in GPTConfig; if so, the slot after a row's keys has the second half of the next key

    def attend(self, q, k, v, window):
        """Store k, v [B, 1, G, D]; returns the attention [B, 1, H, D] of q over the keys of its row."""
        if self.key_offset:
            before = self.k[self.rows, self.slots]
            self.k[self.rows, self.slots + 1] = k[:, 0]
            k = offset_keys(k, before[:, None], (self.slots == 0)[:, None, None, None])
        self.k[self.rows, self.slots] = k[:, 0]
        self.v[self.rows, self.slots] = v[:, 0]
        return self.decode(q, window)

    def decode(self, q, window):
        """The attention [B, 1, H, D] of q over the keys of its row, which include those of the new tokens."""
        return decode(q, self.k, self.v, self.lengths, window=window)


class Cache:
    """Keys and values of `batch` rows of up to block_size tokens.

    Attributes:
        k, v: [layers, B, S, G, D], where S is block_size, and one more with key_offset.
        lengths: [B] int32, the number of tokens in each row.
    """

    def __init__(self, config, batch, device, dtype):
        slots = config.block_size + config.key_offset
        shape = (config.n_layer, batch, slots, config.kv_heads, config.head_dim)
        self.k, self.v = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.rows = torch.arange(batch, device=device)
        self.slots = torch.zeros_like(self.rows)
        shared = self.rows, self.slots, self.lengths, config.key_offset
        layers = [DecodeLayer(k, v, *shared) for k, v in zip(self.k, self.v, strict=True)]
        self.next = View(self.slots[:, None], layers)  # the same in every step: only the contents of its tensors change
        # PyTorch's attention has nothing to compile, so the first token comes sooner
        self.impl = "sdpa" if config.attention == "auto" else config.attention

    def prefill(self, tokens, rows, sources):
        """View for tokens [N, T]: their row sources[i] becomes the beginning of row rows[i] of the cache.

        The caller sets the lengths, because some of the tokens may be padding. With key_offset, each row needs a token
        of padding after its text, whose key has the second half of the next one.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        layers = [PrefillLayer(k, v, rows, sources, self.impl) for k, v in zip(self.k, self.v, strict=True)]
        return View(positions, layers)

    def step(self):
        """View for one more token in each row; the lengths include it from now on."""
        self.slots.copy_(self.lengths)
        self.lengths += 1
        return self.next
