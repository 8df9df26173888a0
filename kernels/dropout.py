"""Dropout that draws its random numbers in bulk, on a CPU and where the network is compiled for a GPU.

PyTorch draws one random number for each element on a CPU, in one thread, and so does torch.compile on a GPU, in the
forward and once more in the backward. Here four come from one of 64 bits, and the backward keeps which were kept.
"""

import torch
from torch import nn

from attention.sdpa import keep


class Dropout(nn.Dropout):
    """nn.Dropout; its probability is rounded to a multiple of 1 / 32,768 where numbers are drawn in bulk."""

    def forward(self, x):
        in_bulk = x.device.type == "cpu" or (x.is_cuda and torch.compiler.is_compiling())
        if not (self.training and self.p > 0 and in_bulk):
            return super().forward(x)
        kept, growth = keep(x.shape, self.p, x.device)
        return x * kept * growth
