"""What several kernels share."""

import os
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@cache
def shared_memory(device):
    """Bytes that one program may use."""
    if INTERPRETED.value:
        return 2**31
    return {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(torch.cuda.get_device_capability(device), 99) * 2**10


@cache
def processors(device):
    """Multiprocessors of a GPU."""
    if INTERPRETED.value:
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def can_overlap(device):
    """Whether a kernel may start before the previous one has ended (CUDA's programmatic dependent launch).

    Other GPUs than Hopper's have it too, but were not tried.
    """
    return not INTERPRETED.value and torch.cuda.get_device_capability(device) == (9, 0)


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Every kernel launched with launch_pdl calls this before its first load or store."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def tanh(x):
    """By its series near 0, where the difference of exponentials would cancel."""
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.04, series, 1 - 2 / (tl.exp(2 * x) + 1))
