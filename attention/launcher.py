"""How kernels are started: by calling Triton's launcher in C with addresses.

What Triton does before each such call can take longer than the kernel. Here it is done once for a problem, and what the
launcher got is remembered; later calls only bring other addresses.

All that bypasses Triton's own launch is in this file. What it saves is in benchmarks/LOG.md ("Attention: cost of
a call on the host").
"""

import copy
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from operator import itemgetter
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait
from triton.runtime.errors import OutOfResources

from .tiles import INTERPRETED


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Every kernel launched with launch_pdl=OVERLAP calls this before its first access to memory."""
    if OVERLAP:
        gdc_wait()


SAME = int, float, type(None), tl.constexpr  # arguments without addresses
REMEMBERED = 32  # addresses of a tensor for which its argument, such as a TMA map, is remembered


class Step(NamedTuple):
    """A kernel to start."""

    kernel: triton.JITFunction
    programs: int
    args: tuple  # tensors, TMA descriptors, numbers and tuples of these
    constants: tuple  # its last parameters
    warps: int = 4
    stages: int = 1
    registers: int | None = None  # at most so many of a thread


def start(problem, steps, call, tensors, *flags):
    """Start the kernels that steps(problem, call, tensors, *flags) lists.

    steps() may view tensors, but must not copy them. All start at multiples of 16 bytes. The shapes of tensors follow
    from the problem, their strides and the flags.
    """
    if INTERPRETED.value:
        for step in steps(problem, call, tensors, *flags):
            interpret(step)
        return
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    if problem.device.index not in (device, None):
        with torch.cuda.device(problem.device):
            start(problem, steps, call, tensors, *flags)
        return
    given = [x for x in (*call.tensors, *tensors) if x is not None]
    signature = steps, flags, *[x is not None and (x.is_contiguous() or x.stride()) for x in tensors]
    launches = problem.cache.get(signature)
    if launches is None:
        launches = problem.cache[signature] = prepare(problem, device, given, steps, call, tensors, flags)
    addresses, stream = [x.data_ptr() for x in given], driver.get_current_stream(device)
    for launch in launches:
        launch(addresses, stream)


def interpret(step):
    step.kernel[(step.programs,)](*step.args, *step.constants)


def prepare(problem, device, given, steps, call, tensors, flags):
    """launch_of() each of steps(problem, call, tensors, *flags), which get stand-ins for the tensors that are given."""
    stand_ins = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in given]
    numbers = {storage_of(x): number for number, x in enumerate(stand_ins)}
    left = iter(stand_ins)
    fields, tensors = ([None if x is None else next(left) for x in group] for group in (call.tensors, tensors))
    steps = steps(problem, call.with_tensors(fields), tensors, *flags)
    return [launch_of(step, find_kernel(step, device), numbers) for step in steps]


class Kernel(NamedTuple):
    """A compiled kernel, and how Triton starts it."""

    compiled: object  # which Triton 3.9 unloads when nobody holds it
    launch: Callable  # Triton's launcher in C
    settings: list  # what this gets before the kernel's arguments; PROGRAMS and STREAM stand for these
    args_in_tuple: bool
    encode: Callable | None  # what makes the arguments of a TMA descriptor, of its kind
    kinds: tuple


PROGRAMS, STREAM = object(), object()
KERNELS = {}


def find_kernel(step, device):
    """The Kernel of a Step, and of all others for which Triton would compile the same."""
    signature = device, step.kernel, compiled_for(step.args), *step[3:]
    kernel = KERNELS.get(signature)
    if kernel is None:
        kernel = KERNELS[signature] = compile_step(step)
    return kernel


def compiled_for(x):
    """What of an argument Triton compiles a kernel for."""
    if isinstance(x, int):
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31
    if isinstance(x, tuple):
        return tuple([None if part is None else compiled_for(part) for part in x])
    if isinstance(x, Tensor):
        return x.dtype, x.untyped_storage().nbytes() < 2**31  # Triton has other code for these on AMD
    if isinstance(x, tl.constexpr):
        return x.value, type(x.value)
    if is_descriptor(x):
        return x.base.dtype, tuple(x.block_shape)  # its layout follows from these
    return type(x)


def compile_step(step):
    """The Kernel of a Step. Triton's hooks for profilers are left out."""
    registers = {} if step.registers is None else dict(maxnreg=step.registers)  # which is NVIDIA's alone
    for stages in range(step.stages, 0, -1):
        compiled = step.kernel.warmup(
            *step.args, *step.constants, grid=(step.programs,), num_warps=step.warps, num_stages=stages,
            enable_fp_fusion=True,  # Triton 3.10 will no longer do so by itself
            **registers,
        )  # fmt: skip
        # features take shared memory too: if it does not suffice, buffer less ahead
        with suppress(OutOfResources) if stages > 1 else nullcontext():
            run = compiled.run  # which loads it
            break
    passed, recorder, args = [], copy.copy(run), (*step.args, *step.constants)
    recorder.launch = lambda *given: passed.extend(given)
    recorder(PROGRAMS, 1, 1, STREAM, compiled.function, compiled.packed_metadata, None, None, None, *args)
    args_in_tuple = type(passed[-1]) is tuple  # from Triton 3.7 on; 3.6 passes them one by one
    launch, encode = run.launch, None
    if inspect.isfunction(launch):  # around the one in C, to make TMA descriptors in each launch
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        encode = sys.modules[type(run).__module__].make_tensordesc_arg
    kinds = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    return Kernel(compiled, launch, passed[: -1 if args_in_tuple else -len(args)], args_in_tuple, encode, kinds)


def launch_of(step, kernel, numbers):
    """A function of addresses and a stream that starts a Step.

    numbers: {storage of a stand-in: which of the addresses is its tensor's}.
    """
    _, launch, settings, args_in_tuple, encode, kinds = kernel
    settings = [step.programs if x is PROGRAMS else x for x in settings]
    at = settings.index(STREAM)
    before, after = settings[:at], settings[at + 1 :]
    kinds, parts, same = iter(kinds), [], []
    for x in step.args:
        storages = defaultdict(int)
        fill(x, storages)
        if storages:
            kind = (next(kinds, None), None) if encode is not None and is_descriptor(x) else None
            argument = Argument(x, list(storages), encode, kind)
            parts.append((same, itemgetter(*map(numbers.get, storages)), argument))
            same = []
        else:
            same.append(x)
    same += step.constants

    def launch_at(addresses, stream):
        args = []
        for constants, select, argument in parts:
            args += constants
            args += argument[select(addresses)]
        args += same
        launch(*before, stream, *after, *((args,) if args_in_tuple else args))

    return launch_at


class Argument(dict):
    """{addresses: what the launcher gets, in a list, for an argument whose tensors lie there}."""

    def __init__(self, x, storages, encode, kind):
        self.x, self.storages, self.encode, self.kind = x, storages, encode, kind  # kind: of a TMA descriptor

    def __missing__(self, selected):
        if len(self) >= REMEMBERED:
            self.clear()
        addresses = selected if len(self.storages) > 1 else (selected,)
        x = fill(self.x, dict(zip(self.storages, addresses, strict=True)))
        if self.kind is not None:  # from Triton 3.8 on with a third argument, not used
            self[selected] = self.encode(*(x, *self.kind)[: self.encode.__code__.co_argcount])
        else:
            self[selected] = [x]
        return self[selected]


def fill(x, addresses):
    """An argument with addresses in place of tensors; addresses: {storage: where it begins}."""
    if isinstance(x, SAME):
        return x
    if isinstance(x, Tensor):
        return addresses[storage_of(x)] + x.storage_offset() * x.itemsize
    if isinstance(x, tuple):
        return tuple([part if isinstance(part, SAME) else fill(part, addresses) for part in x])
    filled = object.__new__(type(x))  # its constructor would check it anew
    vars(filled).update(vars(x), base=Address(fill(x.base, addresses)))
    return filled


class Address(NamedTuple):
    """Where a tensor lies, in place of the tensor."""

    address: int

    def data_ptr(self):
        return self.address


def storage_of(x):
    return x.untyped_storage()._cdata


def is_descriptor(x):
    """Whether it is a TMA descriptor."""
    return hasattr(x, "block_shape")
