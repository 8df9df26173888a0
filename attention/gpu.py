"""What the GPU is and what it can do, asked here and nowhere else. This module needs no Triton."""

import os
from functools import cache, wraps
from importlib.util import find_spec

import torch

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton then runs kernels on the CPU, in Python
HOPPER = (9, 0)
LEAST = (8, 0)  # below, Triton multiplies without tensor cores, and a T4 lacks shared memory for a head dim of 128


def runs_kernels(device):
    """Whether Triton's kernels take tensors of a torch.device."""
    return device.type == "cuda" or INTERPRETED


def chip(device):
    """NVIDIA's compute capability, such as (9, 0); (0, 0) in the interpreter and on AMD, whose MI200 has (9, 0) too."""
    return (0, 0) if INTERPRETED or torch.version.hip else torch.cuda.get_device_capability(device)


def asked_once(question):
    """A function whose answers are kept, also by Dynamo, which then does not trace it.

    As torch.compiler.assume_constant_result, which would import Dynamo: more than a second of each start.
    """
    kept = cache(question)

    @wraps(question)
    def answer(*args):
        return kept(*args)  # of a cached function itself Dynamo warns

    answer._dynamo_marked_constant = True
    answer.cache_clear = kept.cache_clear
    return answer


@asked_once
def takes_kernels(device):
    """Whether Triton's kernels are chosen on a torch.device: on NVIDIA's GPUs from LEAST on."""
    return HAS_TRITON and device.type == "cuda" and chip(device) >= LEAST


@cache
def processors(device):
    """Multiprocessors of a device; 1 for the interpreter, which runs programs one by one."""
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device):
    """Bytes of shared memory that one program may use, as the driver says."""
    return 2**31 if INTERPRETED else torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@cache
def can_overlap(device):
    """Whether a kernel may start before the previous one has ended (CUDA's programmatic dependent launch).

    Other GPUs than Hopper's have it too, but were not tried.
    """
    return chip(device) == HOPPER


@asked_once
def hopper_problem(device):
    """Why the kernels in Gluon do not run on a torch.device, in words; None if they do."""
    if device.type != "cuda" or not torch.cuda.is_available() or chip(device) != HOPPER:
        return f"{device}, which is no Hopper GPU (sm_90)"
    try:
        from .hopper import gluon  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"this Triton, whose Gluon is another: {error}"
    return None
