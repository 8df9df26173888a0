"""How a problem starts a kernel. From the second time on it skips Triton's lookups, which can take
longer than the kernel.

All that bypasses Triton's own launch is in this file. What it saves is in benchmarks/LOG.md ("cost of a call on the
host").
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from .tiles import INTERPRETED, padded


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Every kernel launched with launch_pdl=OVERLAP calls this before its first access to memory."""
    if OVERLAP:
        gdc_wait()


class Launcher:
    """A kernel with its settings for a problem, which keeps it: see Problem.cached()."""

    def __init__(self, kernel, programs, launch, constants, registers=None):
        self.kernel = kernel  # triton.JITFunction
        self.programs = programs
        self.launch = launch
        self.constants = constants  # its last parameters
        self.registers = registers  # at most so many of a thread
        self.compiled = None

    def start(self, *args):
        """Run the kernel with args, which come before its constants.

        Dtypes, alignments and strides are the same in all calls of a problem. So from the second run on, Triton need
        not look them up. Its profiler's hooks are left out too.
        """
        if self.compiled is None:
            self._compile_and_run(args)
            return
        compiled, driver = self.compiled, triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        no_hooks = None, None, None
        compiled.run(
            self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata, *no_hooks, *args, *self.constants
        )

    def _compile_and_run(self, args):
        if INTERPRETED.value:
            self.kernel[(self.programs,)](*args, *self.constants)
            return
        registers = {} if self.registers is None else dict(maxnreg=self.registers)  # which is NVIDIA's alone
        for stages in range(self.launch.num_stages, 0, -1):
            try:
                self.compiled = self.kernel[(self.programs,)](
                    *args, *self.constants, num_warps=self.launch.num_warps, num_stages=stages,
                    enable_fp_fusion=True,  # Triton 3.10 will no longer do so by itself
                    **registers,
                )  # fmt: skip
                return
            except OutOfResources:  # features take shared memory too: buffer less ahead
                if stages == 1:
                    raise


def descriptor(problem, name, x, make, *args):
    """TMA descriptor of a tensor, as make(x, *args) makes it.

    To make and check one takes as long as a launch. So this is done once for each name: later tensors of that name
    differ only in their address.
    """
    known = problem.layouts.get((name, make))
    if known is None:
        made = make(x, *args)
        known = problem.layouts[name, make] = type(made), vars(made) | dict(base=None)
    kind, fields = known
    found = object.__new__(kind)
    vars(found).update(fields, base=x)
    return found


def tma_tiles(x, rows):
    """TMA descriptor of an aligned() [B, T, H, D] tensor in tiles of `rows` positions of a head; past its end are 0."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, 1, padded(x.shape[-1])])


def loop_descriptors(problem, kernel, *tensors):
    """TMA descriptors of the two tensors over which a kernel walks; None and None if it loads by pointers."""
    launch = problem.launches[kernel]
    if not launch.tma or any(0 in x.shape + x.stride() for x in tensors):  # empty, or expanded
        return None, None
    rows = launch.block_k if kernel in ("forward", "dq") else launch.block_q
    return [descriptor(problem, (kernel, i), x, tma_tiles, rows) for i, x in enumerate(tensors)]
