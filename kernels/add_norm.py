"""A branch joins the residual stream, and the norm after it: x + dropout(y), and its norm.

On a GPU, with dropout, one kernel does it in each direction (kernels/add_norm_kernel.py). The formula below serves
everywhere else and is the kernel's reference. Without dropout, torch.compile fuses the formula just as well.
"""

import torch

from attention.decode import HAS_TRITON

WIDEST = 1024  # channels; a warp has too few registers for a wider row


def draw_seeds(x, dropout, count):
    """Seeds of `count` masks, [1] int64 each, drawn by PyTorch; a list of None where PyTorch is to draw the masks.

    x: the stream, [..., C]. dropout: probability, 0 outside training.
    """
    if dropout == 0 or not x.is_cuda or x.dtype == torch.float64 or x.shape[-1] > WIDEST or not HAS_TRITON:
        return [None] * count
    # 16 bytes apart, because kernels are compiled anew for pointers of another alignment
    return list(torch.randint(2**62, (count, 2), device=x.device)[:, :1])


def add_norm(x, y, norm, drop, seed):
    """(x + drop(y), its norm). x: [..., C]. y: as x, or None for 0. seed: of draw_seeds()."""
    if seed is not None and y is not None and drop.training:
        from kernels import add_norm_kernel  # imports Triton, which not every machine has

        return add_norm_kernel.fused_add_norm(x, y, norm, drop.p, seed)
    x = add(x, y, drop)
    return x, norm(x)


def add(x, y, drop):
    """x + drop(y), or x if y is None; x and y: [..., C]."""
    return x if y is None else x + drop(y)
