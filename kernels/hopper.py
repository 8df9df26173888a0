"""Whether the kernels for Hopper GPUs run here. This module needs no Triton."""

from functools import cache

import torch


@cache
def _on_hopper(device):
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from kernels import gluon  # noqa: F401
    except (ImportError, AttributeError):  # no Triton, or one whose Gluon is another
        return False
    return True


def on_hopper(device):
    """Whether a torch.device is a Hopper GPU, and Triton has Gluon for it."""
    return _on_hopper(device)  # of a cached function itself Dynamo warns


on_hopper._dynamo_marked_constant = True  # Dynamo calls it while tracing, and keeps the answer
