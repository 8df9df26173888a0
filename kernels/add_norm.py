"""A branch joins the residual stream, and the norm after it: x + dropout(y), and its norm.

On a GPU one kernel does it in each direction where weights are dropped (kernels/add_norm_kernel.py); the formula below
serves everywhere else, and is its reference. Without dropout, torch.compile fuses the formula as well.
"""

import torch

from attention.decode import HAS_TRITON

WIDEST = 1024  # channels; of wider rows a warp has too few registers


def draw_seeds(x, dropout, count):
    """Seeds of so many masks, [1] int64 each, from PyTorch's random numbers; None where PyTorch is to draw the masks.

    x: the stream, [..., C]. dropout: probability, 0 also outside training.
    """
    if dropout == 0 or not x.is_cuda or x.shape[-1] > WIDEST or not HAS_TRITON:
        return [None] * count
    # 16 bytes apart, because kernels are compiled anew for pointers of another alignment
    return list(torch.randint(2**62, (count, 2), device=x.device)[:, :1])


def add_norm(x, y, norm, drop, seed):
    """(x + drop(y), its norm). x: [..., C]. y: as x, or None for 0. seed: of draw_seeds()."""
    if seed is not None and y is not None:
        from kernels import add_norm_kernel  # imports Triton, which not every machine has

        return add_norm_kernel.add_norm(x, y, norm, drop.p, seed)
    if y is not None:
        x = x + drop(y)
    return x, norm(x)
