"""Devices: their names and dtypes, autocast, CUDA graphs."""

import os
import re
import sys
from functools import cache
from pathlib import Path

import torch

from errors import require, tell

LARGE = 10**9  # bytes
WARM_UPS = 3  # calls before a CUDA graph is recorded, in which PyTorch compiles, allocates and chooses algorithms


def resolve_device(device):
    """The device that `auto` stands for; UserError if the device is not there, or this PyTorch cannot use it."""
    # without is_available(), GPUs would count whose driver is too old for this PyTorch
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ["cuda"] * (gpus > 0) + ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    problem = gpu_problem(device if device.startswith("cuda:") else "cuda", gpus)
    if device == "auto":
        if problem:
            note(f"{problem}; going on without it")
            there = [name for name in there if name != "cuda"]
        return there[0]
    there += [f"cuda:{number}" for number in range(gpus)]
    reason = f" ({problem})" if problem else ""
    require(device in there, f"device={device!r} is not there{reason}; choose {' or '.join(['auto', *there])}")
    require(not (problem and device.startswith("cuda")), f"{problem}; give --device cpu, or install another PyTorch")
    return device


def gpu_problem(device, gpus):
    """Why PyTorch cannot use an NVIDIA GPU of this machine, in words; None if it can, or if there is none."""
    if torch.version.hip:
        return None
    if not gpus and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    if not gpus:
        found = next(Path("/dev").glob("nvidia[0-9]*"), None)
        rule = f"PyTorch {torch.__version__} sees no GPU, although {found} exists"
        return found and f"{rule}: its driver is too old, or this is a build for CPUs"
    major, minor = torch.cuda.get_device_capability(device)
    for kind, number in re.findall(r"(sm|compute)_(\d+)", " ".join(torch.cuda.get_arch_list())):
        built_for = divmod(int(number), 10)  # code runs on later chips of one generation, PTX on all later ones
        if built_for <= (major, minor) and (built_for[0] == major or kind == "compute"):
            return None
    return f"PyTorch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)} (sm_{major}{minor})"


@cache
def note(sentence):
    """Print a sentence once."""
    start = "\r\x1b[K" if sys.stderr.isatty() else ""  # in place of a progress line
    tell(f"{start}note: {sentence}")


def note_large(path):
    """Name a file that takes seconds to read."""
    size = path.stat().st_size
    if size >= LARGE:
        note(f"reading {path}, {size / 1e9:.1f} GB")


def resolve_dtype(dtype, device):
    """The torch.dtype of matmuls that an option stands for; auto depends on the device."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if not device.startswith("cuda"):
        return torch.float32
    has_bfloat16 = torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if has_bfloat16 else torch.float16


def set_precision(deterministic, on_gpu):
    """Let matmuls of float32 use TF32 on a GPU; if asked, let each run with the same seed compute the same bits."""
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it
        torch.use_deterministic_algorithms(True)


def autocast(dtype, device):
    """torch.autocast to a dtype, an option of config.dtype; it does nothing for float32.

    Its cache of cast weights is off: a forward pass casts each weight once, so the cache saves nothing.
    """
    dtype, kind = resolve_dtype(dtype, device), torch.device(device).type
    if dtype == torch.float32:
        return torch.autocast(kind, enabled=False, cache_enabled=False)
    return torch.autocast(kind, dtype, cache_enabled=False)


class CUDAGraph:
    """A function of tensors that is replayed as a CUDA graph after `warm_ups` calls.

    Its results are overwritten by the next call. Everything else it reads or changes (weights, moments, learning rate)
    must be tensors that stay in place, and it must not wait for the device. Random numbers still follow
    torch.manual_seed().
    """

    def __init__(self, function, warm_ups=WARM_UPS):
        self.function, self.warm_ups, self.calls, self.graph = function, warm_ups, 0, None
        # autograd and the allocator remember the stream: warm up on the recording's, which cannot be the default one
        current = torch.cuda.current_stream()
        self.stream = torch.cuda.Stream() if current == torch.cuda.default_stream() else current

    def __call__(self, *inputs):
        self.calls += 1
        if self.calls <= self.warm_ups:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                results = self.function(*inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            return results
        if self.graph is None:
            self.inputs = [x.clone() for x in inputs]
            self.graph = torch.cuda.CUDAGraph()
            # thread_local: other threads, such as the one that saves a checkpoint, may use the device meanwhile
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.results = self.function(*self.inputs)
        for recorded, x in zip(self.inputs, inputs, strict=True):
            recorded.copy_(x)
        self.graph.replay()
        return self.results
