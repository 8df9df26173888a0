"""Exact attention as Triton kernels, forward and backward: FlashAttention one can read. Stands alone."""

from .api import attention, explain

__all__ = ["attention", "explain"]
