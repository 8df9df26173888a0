"""Log-likelihoods of tokens.

Letters: B rows of a batch, T tokens, C embedding, N scored tokens, V vocabulary.
"""

import numpy as np
import torch
import torch.nn.functional as F

from training.step import autocast

CPU_LOGITS, GPU_LOGITS = 2**22, 2**26  # computed at once; a CPU is faster if they fit into its cache


@torch.inference_mode()
def score(model, requests, batch_size):
    """Yield (log-likelihood in nats, whether every scored token is the most likely one, count) for each request.

    requests: iterable of (ids [up to block_size + 1], count): score the last count < len(ids) ids, each given all ids
        before it.
    """
    device, requests = model.embed.weight.device, iter(requests)
    precision = autocast("auto", device.type)
    size = max(1, (CPU_LOGITS if device.type == "cpu" else GPU_LOGITS) // model.config.vocab_size)
    while batch := [request for _, request in zip(range(batch_size), requests, strict=False)]:
        width = max(len(ids) for ids, _ in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.int64)  # zeros after the end: attention is causal
        scored = torch.zeros(len(batch), width - 1, dtype=torch.bool)
        for row, (ids, count) in enumerate(batch):
            tokens[row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
            scored[row, len(ids) - 1 - count : len(ids) - 1] = True
        with precision:
            hidden = model.hidden(tokens[:, :-1].to(device))[scored.to(device)]  # [N, C]
        targets = tokens[:, 1:][scored].to(device)
        likelihoods, greedy = [], []
        for some, expected in zip(hidden.split(size), targets.split(size), strict=True):
            with precision:
                logits = model.logits(some)
            likelihoods.append(-F.cross_entropy(logits, expected, reduction="none"))
            greedy.append(logits.argmax(-1) == expected)
        counts = [count for _, count in batch]
        likelihoods, greedy = torch.cat(likelihoods).double().cpu(), torch.cat(greedy).cpu()
        for likelihood, is_greedy in zip(likelihoods.split(counts), greedy.split(counts), strict=True):
            yield likelihood.sum().item(), bool(is_greedy.all()), len(likelihood)


def windows(pieces, block_size, stride):
    """Yield requests for score() that together score every token of a text once, except its first.

    pieces: iterable of [count] arrays, the token ids of the text.
    """
    held, context = np.empty(0, np.uint16), 1  # the first `context` tokens of `held` are not scored
    for piece in pieces:
        held = np.concatenate([held, piece])
        while len(held) > block_size:
            yield held[: block_size + 1], block_size + 1 - context
            held, context = held[stride:], block_size + 1 - stride
    if len(held) > context:
        yield held, len(held) - context
