"""The micro-batches of each step: loaded ahead of time, cut to a size that fits into memory, and weighted."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import torch

from data.loader import map_ahead
from device import autocast
from errors import require

CPU_MICRO_BATCH = 32  # sequences; larger micro-batches gain nothing on a CPU
MEMORY_RESERVE = 0.05  # of a GPU's memory, for compiled code, CUDA graphs and NCCL, which a trial step does not have
PREFETCHED = 2  # batches loaded before they are needed


def training_batches(batches, steps, network, optimizer, config, ranks, micro_batch):
    """Yield for each step the iterator of this rank's micro-batches, whose batches a thread loads ahead of time.

    steps: their numbers, in order. micro_batch: sequences of one, a divisor of those of this rank.
    """
    count = config.batch_size // ranks.world
    rows = slice(ranks.rank * count, (ranks.rank + 1) * count)

    def load(step):
        inputs, targets = batches.batch(step, rows)
        weights = (targets >= 0).view(count // micro_batch, -1).sum(1) / max(1, batches.counted(step))
        loaded = inputs, targets, weights
        return [x.pin_memory() for x in loaded] if ranks.on_gpu else loaded  # their copies overlap with the step before

    with ThreadPoolExecutor(1) as pool:
        for step, batch in map_ahead(pool, load, steps, PREFETCHED):
            batch = (x.to(ranks.device, non_blocking=True) for x in batch)
            yield micro_batches(step, *batch, network, optimizer, config, ranks, micro_batch)


def micro_batches(step, inputs, targets, weights, network, optimizer, config, ranks, micro_batch):
    """Yield (inputs, targets [micro_batch, T], weight []) of each micro-batch, and prepare the forward pass of each.

    The weight is the micro-batch's part of the targets of the step that count: those of all ranks add up to 1.
    """
    optimizer.begin()
    # DDP sums the gradients once. FSDP sums those of each micro-batch, because no rank has room for all of them.
    one_sum = ranks.world > 1 and not ranks.sharded
    for first, weight in zip(range(0, len(inputs), micro_batch), weights, strict=True):
        if config.dropout > 0:  # the masks depend on the rows, not on the rank or on earlier steps
            seed = np.random.SeedSequence([config.seed, step, ranks.rank * len(inputs) + first])
            torch.manual_seed(int(seed.generate_state(1, np.uint64)[0]))
        last = first + micro_batch == len(inputs)
        with network.no_sync() if one_sum and not last else nullcontext():
            rows = slice(first, first + micro_batch)
            yield inputs[rows], targets[rows], weight


def choose_micro_batch(model, config, ranks, saved):
    """Sequences per forward pass of one rank: a divisor of the rank's part of the batch.

    saved: the micro-batch of the run that is resumed, or None. It is kept if the option leaves a choice, because
    dropout draws one mask per micro-batch.

    Raises:
        UserError: it cannot be divided, or not even one sequence fits into the GPU's memory.
    """
    count, asked = config.batch_size // ranks.world, config.micro_batch
    size = {0: count, "auto": 1}.get(asked, asked)
    rule = f"batch_size={config.batch_size} must be a multiple of {ranks.world} GPUs x micro_batch={size}; change one"
    require(count % size == 0, rule)
    if saved and (asked == "auto" or (asked == 0 and config.dropout > 0)):
        if count % saved == 0:
            return saved
        require(
            config.dropout == 0,
            f"the saved micro-batch ({saved}) does not divide this run's {count} sequences per GPU; take another "
            f"number of GPUs, or accept other dropout masks: --micro_batch {count} --allow_changes",
        )
    if asked != "auto":
        return size
    divisors = [size for size in range(count, 0, -1) if count % size == 0]
    if not ranks.on_gpu:
        return next(size for size in divisors if size <= CPU_MICRO_BATCH)
    largest = ranks.broadcast(next((size for size in divisors if fits(model, size, config, ranks)), 0))
    remedy = "give --checkpoint_activations blocks, or a smaller network"
    require(largest, f"not even a micro-batch of 1 fits into the GPU's memory; {remedy}")
    return largest


def fits(model, size, config, ranks):
    """Whether a forward and backward pass of `size` sequences fits beside the optimizer's state."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    spare = (2 + (config.ema > 0)) * weights + MEMORY_RESERVE * torch.cuda.mem_get_info(ranks.device)[1]
    try:
        room = torch.empty(int(spare), dtype=torch.uint8, device=ranks.device)
        tokens = torch.zeros(size, config.block_size, dtype=torch.int64, device=ranks.device)
        with autocast(config.dtype, ranks.device):
            loss = model(tokens, tokens)
        loss.backward()
        del room  # held until here
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()  # the next trial may not be able to use blocks of these sizes
