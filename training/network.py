"""The network of a run: its initial weights, FSDP, checkpointed activations and compilation."""

import math
import re
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from kernels.fp8 import convert, require_fp8
from model import require, rotary_angles
from training.checkpoint import empty_model
from training.config import resolve_dtype
from training.fsdp import put, shard
from training.optimizer import moment_bytes
from training.start import compile_mode

STATE_SHARE = 0.8  # of a GPU's memory that weights, gradients and moments may take; the rest is for activations
# controllers of a line of /proc/self/cgroup -> folder, files with the limit and the usage, field of memory.stat
CGROUP_FILES = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# beginnings of the names of ops whose results are kept
EXPENSIVE = (
    "aten.mm.", "aten.addmm.", "aten._scaled_mm.", "aten._scaled_dot_product_", "attention.forward.", "gpt.mlp.",
    "gpt.mlp_fp8.",
)  # fmt: skip


@torch.no_grad()
def make_model(config, tokenizer, ranks):
    """(GPT with its initial weights, Ranks whose `sharded` says whether FSDP spreads the network over them).

    Each parameter is drawn on this rank's device, which with FSDP keeps its shard of it.

    Raises:
        ValueError: FSDP or the GPU cannot train with these options, or rank 0 has too little host memory for a
            checkpoint.
    """
    if config.fp8:
        require_fp8(ranks.device, resolve_dtype(config.dtype, ranks.device))
    network = config.model(tokenizer)
    model = empty_model(network, "meta")
    sizes = [4 * p.numel() for p in model.parameters()]  # bytes in float32; gradients take as many
    weights = sum(sizes)
    moments = moment_bytes(model, config)
    ranks = ranks._replace(sharded=ranks.share(use_fsdp(2 * weights + moments, config, ranks)))
    if ranks.rank == 0:
        # PyTorch rounds each pinned tensor up to a power of two; moments are assumed to grow by the factor of weights
        pinned = sum(1 << (size - 1).bit_length() for size in sizes) / weights if ranks.on_gpu else 1
        saved = (weights + moments) * (1 if ranks.sharded else pinned)
        offloaded = (2 * weights * pinned + moments) * config.cpu_offload
        what = "checkpoints and the state that cpu_offload moves" if offloaded else "checkpoints"
        require_host_memory(saved + offloaded, what)
    if ranks.sharded:
        dtype = resolve_dtype(config.dtype, ranks.device)
        scaled = dtype == torch.float16
        require(not scaled, "FSDP does not scale gradients, as dtype=float16 needs; take bfloat16 or float32")
        require(not config.fp8, "FSDP does not multiply in FP8; leave out --fp8, or give --parallel ddp")
        require(config.micro_batch != "auto", "micro_batch=auto cannot be tried with FSDP; give a number, such as 1")
        require(config.sample_every == 0, "sample_every needs a whole network, not FSDP; run sample.py meanwhile")
        shard(model, dtype, config.cpu_offload, "cuda" if ranks.on_gpu else "cpu")
        materialise(model, ranks.device, "cpu" if config.cpu_offload else None)
    else:
        model = empty_model(network, ranks.device).to(ranks.device)  # its buffers are on the CPU
        if config.fp8:
            convert(model)
    if config.checkpoint_activations != "off":
        checkpoint_activations(model, config)
    for parameter, value in model.first_weights(config.seed, ranks.device):
        put(parameter, value)
    return model, ranks


def materialise(model, device, parameter_device=None):
    """Move a GPT from the device "meta" to another, with arbitrary weights.

    parameter_device: where the parameters stay, if not on `device`, which computes.
    """
    model.to_empty(device=parameter_device or device)
    if model.config.tie_head:
        model.head.weight = model.embed.weight  # to_empty() has separated them
    if model.config.position == "rope":
        model.rotary_cos, model.rotary_sin = (x.to(device) for x in rotary_angles(model.config))


def use_fsdp(need, config, ranks):
    """Whether FSDP spreads a network over the ranks; prints this if --parallel is auto and it does.

    need: bytes of its weights, gradients and moments.
    """
    if config.parallel != "auto" or ranks.world == 1 or not ranks.on_gpu:
        return config.parallel == "fsdp"
    memory = torch.cuda.mem_get_info(ranks.device)[1]
    too_large = need > STATE_SHARE * memory
    if too_large and ranks.rank == 0:
        print(
            f"parallel   FSDP, because weights, gradients and moments take {need / 1e9:.1f} GB, "
            f"more than {STATE_SHARE:.0%} of a GPU's {memory / 1e9:.1f} GB",
            flush=True,
        )
    return too_large


def free_host_memory(root="/"):
    """Bytes of host memory that this process may still take: what is available in Linux, or less under a limit.

    Limits are those of a container or a batch system: of the process's control group (version 1 or 2) and of the groups
    around it. Cached files that Linux can drop count as free. Infinity if nothing is known.
    """
    root, free = Path(root), [math.inf]
    with suppress(OSError, TypeError):
        free.append(1024 * int(re.search(r"MemAvailable: *(\d+) kB", (root / "proc/meminfo").read_text())[1]))
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers not in CGROUP_FILES:
                continue
            place, limit, usage, cached = CGROUP_FILES[controllers]
            own = root / "sys/fs/cgroup" / place / group.strip("/")
            for folder in (own, *own.parents):
                with suppress(OSError, ValueError):  # no limit here: no file, or "max"
                    used = int((folder / usage).read_text())
                    fields = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
                    free.append(int((folder / limit).read_text()) - used + int(fields.get(cached, 0)))
    return min(free)


def require_host_memory(need, what):
    """ValueError if less than `need` bytes of host memory are free. what: needs them, for the sentence."""
    free = free_host_memory()
    require(
        need <= free,
        f"{what} take {need / 1e9:.1f} GB of host memory, of which {free / 1e9:.1f} GB are free; "
        "take a smaller network or a host with more memory",
    )


def checkpoint_activations(model, config):
    """Let the blocks of a GPT recompute activations in the backward pass, as config.checkpoint_activations says."""
    options = dict(use_reentrant=False, preserve_rng_state=config.dropout > 0)
    if config.checkpoint_activations == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_expensive)
    for block in model.blocks:
        block.again = options


def keep_expensive(context, op, *args, **kwargs):
    """The policy of selective checkpointing: keep what matmuls and attention return."""
    return CheckpointPolicy.MUST_SAVE if str(op).startswith(EXPENSIVE) else CheckpointPolicy.PREFER_RECOMPUTE


def compile_and_wrap(model, config, ranks):
    """The network to train: the model, compiled as config.compile says, and in DDP if it is whole on several ranks."""
    compiled = compile_mode(config, ranks)
    if compiled == "blocks" or (ranks.sharded and compiled == "model"):  # FSDP gathers between the blocks
        for block in model.blocks:
            block.compile()
    network = torch.compile(model) if compiled == "model" and not ranks.sharded else model
    if ranks.world > 1 and not ranks.sharded:
        device = [ranks.device] if ranks.on_gpu else None
        network = DistributedDataParallel(network, device_ids=device, gradient_as_bucket_view=True)
    return network
