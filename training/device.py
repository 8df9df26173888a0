"""The device of a run: its name and dtype, autocast, CUDA graphs and compilation."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module

import torch

from errors import require
from kernels.fp8 import convert
from training.checkpoint import empty_model

WARM_UPS = 3  # calls before a CUDA graph is recorded, in which PyTorch compiles, allocates and chooses algorithms
DDP_WARM_UPS = 11  # DDP measures itself in the first 10 steps, which a graph cannot record


def resolve_device(device):
    """The device that `auto` stands for; UserError if the device is not there."""
    # without is_available(), GPUs would count whose driver is too old for this PyTorch
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ["cuda"] * (gpus > 0) + ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    if device == "auto":
        return there[0]
    there += [f"cuda:{number}" for number in range(gpus)]
    require(device in there, f"device={device!r} is not there; choose auto or one of {', '.join(there)}")
    return device


def resolve_dtype(dtype, device):
    """The torch.dtype of matmuls that an option stands for; auto depends on the device."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if not device.startswith("cuda"):
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def set_precision(deterministic, on_gpu):
    """Let matmuls of float32 use TF32 on a GPU; if asked, let each run with the same seed compute the same bits."""
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it
        torch.use_deterministic_algorithms(True)


def autocast(dtype, device):
    """torch.autocast to a dtype, an option of config.dtype; it does nothing for float32.

    Autocast's cache of cast weights is off. A forward pass casts each weight once, so the cache saves nothing. And a
    thread that leaves autocast clears the cache of all threads, which can deadlock with the thread that compiles.
    """
    dtype, kind = resolve_dtype(dtype, device), torch.device(device).type
    if dtype == torch.float32:
        return torch.autocast(kind, enabled=False, cache_enabled=False)
    return torch.autocast(kind, dtype, cache_enabled=False)


def eagerly():
    """The context in which compiled modules run eagerly.

    Without torch._dynamo, which takes seconds to import, nothing has been compiled.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


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


def as_graph(take_step, network, optimizer, config, ranks, micro_batch):
    """take_step() as a function of micro-batches; replayed as a CUDA graph where that is possible.

    Sums over micro-batches are not recorded, nor is what waits for the device or restores PyTorch's random state.
    """
    step = partial(take_step, network, optimizer)
    redraws = config.checkpoint_activations != "off" and config.dropout > 0
    recordable = ranks.on_gpu and not ranks.sharded and not optimizer.scaler.is_enabled() and not redraws
    if not (config.cuda_graph and recordable and micro_batch * ranks.world == config.batch_size):
        return step
    graph = CUDAGraph(lambda *tensors: step([tensors]), WARM_UPS if ranks.world == 1 else DDP_WARM_UPS)
    return lambda micro_batches: graph(*next(micro_batches))


# Imported before the threads below start: threads that import the same module at once can see it half made.
KERNELS = (
    "kernels.cross_entropy", "kernels.cross_entropy_hopper", "kernels.matmul",
    "attention.portable.launch", "attention.hopper.launch",
)  # fmt: skip


@contextmanager
def kernels_ahead(model_config, config, ranks, micro_batch):
    """Compile a run's kernels in two threads, while the body of this context compiles the network.

    One thread evaluates a network with few layers, in which attention checks itself. The other runs a training step of
    such a network, with the kernels that attention will probably choose. The step draws random numbers, so no CUDA
    graph can be recorded meanwhile. Without a GPU there is nothing to compile.
    """
    if not ranks.on_gpu:
        yield
        return
    for module in KERNELS:
        with suppress(ImportError, AttributeError):  # no Triton, or one without Hopper's kernels
            import_module(module)
    # Fewer rows take less memory, and Triton compiles for multiples of 16 alike. With grouped queries the number of
    # programs decides which kernels serve.
    grouped = model_config.kv_heads != model_config.n_head
    rows = micro_batch if micro_batch % 16 or grouped else 16
    tokens = torch.zeros(rows, config.block_size, dtype=torch.int64, device=ranks.device)
    # the first blocks have all kinds of kernels
    small = replace(model_config, n_layer=min(4, model_config.n_layer) if model_config.window else 1)

    def loss_of(model):
        with autocast(config.dtype, ranks.device):
            return model(tokens, tokens)

    def compile_evaluation():
        with torch.no_grad(), torch.cuda.device_of(tokens):  # else a thread has the first GPU
            loss_of(empty_model(small, ranks.device).eval())

    def compile_training():
        for guess in ["hopper", "triton"] if small.attention == "auto" else [small.attention]:
            with suppress(ValueError):  # the Hopper kernels do not serve it
                model = empty_model(replace(small, attention=guess), ranks.device)
                if config.fp8:
                    convert(model)
                # in this thread: otherwise the GPU's only thread for gradients would wait for the compiler
                with torch.autograd.set_multithreading_enabled(False), torch.cuda.device_of(tokens):
                    loss_of(model).backward()
                break

    # Errors are not reported here: the main thread will get the same ones.
    with ThreadPoolExecutor(2) as pool:
        pool.submit(compile_evaluation)
        pool.submit(compile_training)
        yield
    torch.cuda.empty_cache()


def compile_mode(config, ranks):
    """What torch.compile compiles: "model", "blocks" or "off"."""
    if config.compile == "auto":
        return "model" if ranks.on_gpu else "off"
    return config.compile


def compile_network(network, config, ranks, micro_batch):
    """Compile the network now, forward and backward, by a pass over zeros; weights and their .grad stay as they are.

    DDP and FSDP compile in the first step instead, where they must see the gradients. So does a network if memory is
    short: kernels_ahead() uses some meanwhile, which the first step has for itself.
    """
    if ranks.world > 1 or ranks.sharded or compile_mode(config, ranks) == "off":
        return
    # two tensors: the same one twice would be compiled as a special case
    tokens, targets = (
        torch.zeros(micro_batch, config.block_size, dtype=torch.int64, device=ranks.device) for _ in range(2)
    )
    with suppress(torch.OutOfMemoryError):
        torch.autograd.grad(network(tokens, targets), list(network.parameters()))
    if ranks.on_gpu:
        torch.cuda.empty_cache()  # the step may run on another stream, which could not use this memory
