"""Exact attention as Triton kernels, forward and backward: FlashAttention one can read. Stands alone."""

from .api import attention, attention_qkv, explain
from .decode import decode

__all__ = ["attention", "attention_qkv", "decode", "explain"]
