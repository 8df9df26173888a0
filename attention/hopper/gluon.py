"""Gluon's names as attention/ uses them, whatever they are called in the installed Triton (3.6 to 3.9).

Importing this module fails with ImportError or AttributeError where Triton lacks one of them; hopper_problem() in
gpu.py asks once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import core

# Newer names first: Triton 3.9 keeps the old ones only to raise.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_wait = tma.store_wait
triton_aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate
# all warps of one function of warp_specialize() meet
partition_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

if hasattr(tma, "async_atomic_add"):
    tma_add = tma.async_atomic_add
else:  # in the compiler since 3.6, but without a name
    from triton._C.libtriton import ir

    @builtin
    def tma_add(tensor_desc, coord, src, _semantic=None):
        """tensor[coord : coord + block] += src, from shared memory, in no particular order."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


def aggregate(cls):
    """Make a class a record that keeps compile-time constants; those of a NamedTuple become run-time values."""
    names = list(cls.__annotations__)

    def init(self, *values):
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value)

    init.__triton_builtin__ = True  # else Triton rejects it as a function that kernels use but it cannot compile
    cls.__init__, cls.__annotations__ = init, dict.fromkeys(names, object)  # no types are checked: fields may be None
    return triton_aggregate(cls)


@builtin
def warpgroup_mma_wait(num_outstanding, deps, _semantic=None):
    """Wait until so many products are left; deps: results of those that are done, which it returns.

    Each warpgroup waits for its own. Triton 3.9 would add a barrier of all of them behind most waits, for kernels that
    go on to overwrite operands; ours have barriers of their own before that.
    """
    results = hopper.warpgroup_mma_wait(num_outstanding, deps, _semantic=_semantic)
    first = results if len(deps) == 1 else results[0]
    first.handle.set_attr("warpGroupLocal", _semantic.builder.get_unit_attr())
    return results


__all__ = [
    "TensorDescriptor", "aggregate", "fence_async_shared", "gl", "gluon", "mbarrier", "partition_barrier", "tma_add",
    "tma_load", "tma_store", "tma_wait", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip
