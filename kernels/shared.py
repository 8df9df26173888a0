"""What several kernels share."""

import os
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@cache
def has_large_shared_memory(device):
    """Whether a multiprocessor has 160 KB of it or more; gaming and workstation GPUs have 100."""
    return INTERPRETED.value or torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0))


@cache
def can_overlap(device):
    """Whether a kernel may start before the one in front of it has ended (programmatic dependent launch): from Hopper
    GPUs on."""
    return not INTERPRETED.value and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait for the results of the kernel in front; those launched with launch_pdl begin with it."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def tanh(x):
    """By its series near 0, where the difference of exponentials would cancel."""
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.04, series, 1 - 2 / (tl.exp(2 * x) + 1))
