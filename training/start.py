"""The start of a run: kernels and the network are compiled in parallel, and a clock measures each part."""

import os
import time
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from threading import Thread

import torch

from kernels.fp8 import convert
from training.checkpoint import empty_model
from training.step import autocast


class StartClock:
    """Seconds that each part of a start took, in order: the dict `parts`. Creating it ends the part "imports"."""

    def __init__(self):
        self.parts, self.since = {"imports": process_age()}, time.perf_counter()

    def end(self, part):
        """Record the time since the previous part ended as that of `part`."""
        now = time.perf_counter()
        self.parts[part], self.since = now - self.since, now


def process_age():
    """Seconds since this process was started; 0.0 on systems without Linux's /proc."""
    with suppress(OSError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


# Imported before the threads below start: threads that import the same module at once can see it half made.
KERNELS = (
    "kernels.cross_entropy", "kernels.cross_entropy_hopper", "kernels.matmul", "kernels.add_norm_kernel",
    "attention.portable.launch", "attention.hopper.launch",
)  # fmt: skip


class KernelsAhead:
    """Compiles the kernels of a run in two threads, while the body of a `with` compiles the network.

    One thread evaluates a network with few layers, in which attention checks itself. The other runs a training step of
    such a network, with the kernels that attention will probably choose. The step draws random numbers, so no CUDA
    graph can be recorded meanwhile. Without a GPU there is nothing to compile.

    Args:
        model_config: GPTConfig. config: Config. ranks: Ranks. micro_batch: sequences per forward pass.
    """

    def __init__(self, model_config, config, ranks, micro_batch):
        self.config, self.device = config, ranks.device
        # Fewer rows take less memory, and Triton compiles for multiples of 16 alike. With grouped queries the number of
        # programs decides which kernels serve.
        grouped = model_config.kv_heads != model_config.n_head
        self.rows = micro_batch if micro_batch % 16 or grouped else 16
        # the first blocks have all kinds of kernels
        small = replace(model_config, n_layer=min(4, model_config.n_layer) if model_config.window else 1)
        jobs = (self.evaluate, self.train) if ranks.on_gpu else ()
        self.threads = [Thread(target=self.quietly, args=(job, small), daemon=True) for job in jobs]

    def __enter__(self):
        for module in KERNELS if self.threads else ():
            with suppress(ImportError, AttributeError):  # no Triton, or one without Hopper's kernels
                import_module(module)
        for thread in self.threads:
            thread.start()

    def __exit__(self, *error):
        for thread in self.threads:
            thread.join()
        if self.threads:
            torch.cuda.empty_cache()

    def quietly(self, job, model_config):
        """Errors are not reported here: the main thread will get the same ones."""
        with suppress(Exception):
            if self.device.startswith("cuda:"):
                torch.cuda.set_device(self.device)  # of this thread, which otherwise has the first GPU
            job(model_config)

    def evaluate(self, model_config):
        with torch.no_grad():
            self.loss(empty_model(model_config, self.device).eval())

    def train(self, model_config):
        asked = model_config.attention
        for guess in ["hopper", "triton"] if asked == "auto" else [asked]:
            with suppress(ValueError):  # the Hopper kernels do not serve it
                # in this thread: otherwise the GPU's only thread for gradients would wait for the compiler
                with torch.autograd.set_multithreading_enabled(False):
                    model = empty_model(replace(model_config, attention=guess), self.device)
                    if self.config.fp8:
                        convert(model)
                    self.loss(model).backward()
                break

    def loss(self, model):
        tokens = torch.zeros(self.rows, self.config.block_size, dtype=torch.int64, device=self.device)
        with autocast(self.config.dtype, self.device):
            return model(tokens, tokens)


def compile_mode(config, ranks):
    """What torch.compile compiles: "model", "blocks" or "off"."""
    if config.compile == "auto":
        return "model" if ranks.on_gpu else "off"
    return config.compile


def compile_network(network, config, ranks, micro_batch):
    """Compile the network now, forward and backward, by a pass over zeros; weights and their .grad stay as they are.

    DDP and FSDP compile in the first step instead, where they must see the gradients. So does a network if memory is
    short: KernelsAhead uses some meanwhile, which the first step has for itself.
    """
    if ranks.world > 1 or ranks.sharded or compile_mode(config, ranks) == "off":
        return
    with suppress(torch.OutOfMemoryError):
        pass_over_zeros(network, config, ranks, micro_batch)
    if ranks.on_gpu:
        torch.cuda.empty_cache()  # the step may run on another stream, which could not use this memory


def pass_over_zeros(network, config, ranks, micro_batch):
    # two tensors: the same one twice would be compiled as a special case
    tokens, targets = (
        torch.zeros(micro_batch, config.block_size, dtype=torch.int64, device=ranks.device) for _ in range(2)
    )
    with autocast(config.dtype, ranks.device):
        loss = network(tokens, targets)
    torch.autograd.grad(loss, list(network.parameters()))
