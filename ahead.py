"""What threads do ahead of time: compile the kernels of attention, and fetch the batches of the next steps."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread

import torch

from attention import attention

STEPS_AHEAD = 2  # of batches: one in use and one ready


def compile_attention(config, rows, device, dtype):
    """Begin to compile the kernels that a network's attention will start, for evaluation and for training.

    They take as long as the compilation of all else, which can go on meanwhile, since Triton's compiler runs without
    Python's lock. No random number is drawn. An error is left for the run to meet.

    Args:
        config: GPTConfig. rows: of a micro-batch. device: a CUDA device. dtype: of the matmuls.

    Returns:
        The threads, none if other than our kernels are asked for; a program waits for them at its end.
    """
    if config.attention in ("sdpa", "reference"):
        return []
    heads = (config.n_head, config.kv_heads, config.kv_heads)

    def call(dropout, gradients):
        with suppress(Exception), torch.cuda.device(device), torch.set_grad_enabled(gradients):
            shape = (rows, config.block_size, sum(heads), config.head_dim)
            qkv = torch.zeros(shape, device=device, dtype=dtype, requires_grad=gradients)
            seed = 0 if dropout > 0 else None
            out = attention(*qkv.split(heads, dim=2), dropout=dropout, seed=seed, impl=config.attention_impl)
            if gradients:
                torch.autograd.grad(out, qkv, torch.zeros_like(out))

    threads = [Thread(target=call, args=kind) for kind in ((0.0, False), (config.dropout, True))]
    for thread in threads:
        thread.start()
    return threads


def fetch_ahead(fetch, places):
    """Yield fetch(*place) for each of the places, fetched in a thread a little ahead; its errors are raised here."""
    with ThreadPoolExecutor(1) as pool:
        waiting = deque()
        for place in places:
            waiting.append(pool.submit(fetch, *place))
            if len(waiting) > STEPS_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
