"""The elementwise parts of Muon, each in one pass over memory; training/optimizer.py has the same in PyTorch.

Momenta and weights are contiguous float32. skip, scale and rate are scalars on the GPU, which a CUDA graph reads anew.
"""

import torch
import triton
import triton.language as tl

from attention.ops import refuse_unseen

BLOCK, WARPS = 4096, 8


def blend(momentum, gradient, out, fraction, scale, skip):
    """As blend() of training/optimizer.py."""
    assert out.is_contiguous()
    launch(blend_kernel, momentum, gradient.contiguous(), out, scale, skip, fraction)


@triton.jit
def blend_kernel(momentum, gradient, out, scale, skip, fraction, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < count
    old = tl.load(momentum + at, exists)
    g = tl.load(gradient + at, exists).to(tl.float32)
    if scale is not None:
        g /= tl.load(scale)
    new = old + fraction * (g - old)
    tl.store(out + at, (new + fraction * (g - new)).to(out.dtype.element_ty), exists)
    if skip is not None:
        new = tl.where(tl.load(skip) > 0, old, new)
    tl.store(momentum + at, new, exists)


def update(weight, direction, rate, size, decay, skip):
    """As update() of training/optimizer.py."""
    launch(update_kernel, weight, direction.contiguous(), rate, skip, size, decay)


@triton.jit
def update_kernel(weight, direction, rate, skip, size, decay, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < count
    old = tl.load(weight + at, exists)
    step = size * tl.load(direction + at, exists).to(tl.float32)
    new = old - tl.load(rate) * (step + decay * old)
    if skip is not None:
        new = tl.where(tl.load(skip) > 0, old, new)
    tl.store(weight + at, new, exists)


def launch(kernel, target, *args):
    """Start a kernel that updates the elements of `target`, its first argument."""
    refuse_unseen(f"kernels.muon.{kernel.__name__}", target, *args)
    assert target.is_contiguous()
    count = target.numel()
    with torch.cuda.device_of(target):
        kernel[(triton.cdiv(count, BLOCK),)](target, *args, count, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=True)
