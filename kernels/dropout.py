"""Dropout that draws its random numbers in bulk where the network is compiled.

torch.compile draws one random number per element, in the forward and once more in the backward, and each takes the
work of four. Here four numbers of 15 bits come from one of 64, and the backward keeps which elements were kept.
"""

import torch
from torch import nn

LEVELS = 2**15  # of a 16-bit number without its sign


class Dropout(nn.Dropout):
    """nn.Dropout; compiled for a GPU, its probability is rounded to a multiple of 1 / 32,768."""

    def forward(self, x):
        if not (self.training and self.p > 0 and x.is_cuda and torch.compiler.is_compiling()) or x.numel() % 4:
            return super().forward(x)
        numbers = torch.randint(-(2**62), 2**62, (x.numel() // 4,), device=x.device)
        kept = numbers.view(torch.int16).view(x.shape).bitwise_and(LEVELS - 1) >= round(self.p * LEVELS)
        return torch.where(kept, x / (1 - self.p), 0)
