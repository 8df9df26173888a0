"""Exact attention as Triton kernels, forward and backward: FlashAttention one can read. Stands alone. simple.py is the
first text to read; __init__ imports the full one."""

from .api import attention, attention_qkv, explain
from .decode import decode
from .derivative import check_score_mod

__all__ = ["attention", "attention_qkv", "check_score_mod", "decode", "explain"]
