"""Exact attention as Triton kernels, forward and backward: FlashAttention one can read. Stands alone."""

from .api import attention, explain
from .decode import decode

__all__ = ["attention", "decode", "explain"]
