"""--micro_batch auto: the largest micro-batch that fits into the memory of a GPU, found by trying."""

import torch

RESERVE = 0.05  # of a GPU's memory, for what a trial does not have: buffers of compiled code, CUDA graphs and NCCL
ON_CPU = 32  # sequences at most, without a trial: more gain nothing there


def share_of_rank(config, world):
    """Sequences of a rank per step, a multiple of the micro-batch; the global batch depends on neither.

    Raises:
        ValueError: the batch cannot be divided so.
    """
    share = config.batch_size // world
    rows = {0: share, "auto": 1}.get(config.micro_batch, config.micro_batch)
    if share * world != config.batch_size or share % rows:
        raise ValueError(
            f"batch_size={config.batch_size} must be a multiple of {world} GPUs x micro_batch={rows}; change either"
        )
    return share


def choose_micro_batch(config, share, before, search):
    """Sequences per forward pass of one rank: a divisor of its share of the batch.

    Args:
        config: Config. share: sequences of a rank per step. before: the number that a resumed run had, None for a new
            one. search: a function that finds the largest number, for "auto".

    Raises:
        ValueError: `before` does not divide the share and must be kept, because the rows of a micro-batch share a seed
            of dropout.
    """
    asked = config.micro_batch
    if before and (asked == "auto" or (asked == 0 and config.dropout > 0)):
        if share % before == 0:
            return before
        if config.dropout > 0:
            raise ValueError(
                f"{config.resume} was trained in micro-batches of {before}, which {share} sequences for each process "
                "are no multiple of; take another number of processes, or another dropout by "
                f"--micro_batch {share} --allow_changes True"
            )
    return search() if asked == "auto" else asked or share


def largest_micro_batch(model, share, autocast, world, sharded):
    """The largest divisor of `share` that fits the memory of the model's device, or on a CPU one up to ON_CPU.

    world: number of ranks. sharded: whether the optimizer's state is spread over them.
    """
    divisors = [rows for rows in range(1, share + 1) if share % rows == 0]
    if next(model.parameters()).device.type != "cuda":
        return max(rows for rows in divisors if rows <= ON_CPU)
    moments = 2 / (world if sharded else 1)  # of AdamW; Muon's step takes what activations leave free
    copies = moments + (world > 1)  # and the buckets in which DDP sums gradients
    return largest(divisors, lambda rows: fits(model, rows, autocast, copies))


def largest(numbers, good):
    """The largest of ascending numbers that is good, when all below it are and none above; ValueError if none is."""
    low, high = 0, len(numbers)  # numbers[:low] are good, numbers[high:] are not
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if good(numbers[middle]) else (low, middle)
    if low == 0:
        raise ValueError(
            f"not even a micro-batch of {numbers[0]} fits the GPU's memory; take a smaller --block_size or network"
        )
    return numbers[low - 1]


def fits(model, rows, autocast, copies):
    """Whether a step of `rows` sequences fits beside so many copies of the weights; of the trial nothing stays."""
    try:
        _try_step(model, rows, autocast, copies)
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        model.zero_grad(set_to_none=True)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # blocks of this size may be of no use to the next


def _try_step(model, rows, autocast, copies):
    """Forward and backward, not compiled, which takes more memory, beside room for all else that a step holds."""
    device = next(model.parameters()).device
    size = copies * sum(p.numel() * p.element_size() for p in model.parameters())
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        size += RESERVE * total
    room = torch.empty(int(size), dtype=torch.uint8, device=device)  # noqa: F841, held until the backward is done
    tokens = torch.zeros(rows, model.config.block_size, dtype=torch.int64, device=device)
    with autocast:
        loss = model(tokens, tokens)
    loss.backward()
