"""Gluon's names as the kernels for Hopper use them, whatever they are called in the installed Triton (3.6 to 3.9).

Importing this module fails with ImportError or AttributeError where Triton lacks one of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Newer name first: Triton 3.9 keeps the old one only to raise.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

__all__ = ["TensorDescriptor", "gl", "gluon", "mbarrier", "tma_load", "warpgroup_mma", "warpgroup_mma_wait"]
