"""Log-likelihoods and losses of texts.

Letters: B rows of a batch, T tokens, N scored tokens, C embedding.
"""

import math
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from data.loader import validation_batches, windowed
from device import autocast
from generation.choose import refuse_nan
from threads import cpu_threads

CHUNK = 1024  # tokens whose logits are computed at once: 200 MB for GPT-2's vocabulary


@torch.inference_mode()
def score(model, texts, batch_size, stride=None):
    """(log-likelihood of each text in nats, whether all its tokens are the most likely ones): two lists.

    Args:
        model: GPT in evaluation mode. batch_size: windows per forward pass.
        texts: list of (ids [count] or data.shards.Tokens, start): ids[start:] are scored once, each given the ids
            before it in its window.
        stride: tokens from one window of a text to the next; None takes block_size. The last window reaches back as
            far as the others, as in lm-evaluation-harness.

    Raises:
        UserError: the model computes NaN.
    """
    device, windows = model.embed.weight.device, _windows(texts, model.config.block_size, stride)
    likelihoods, misses = torch.zeros(2, len(texts), dtype=torch.float64, device="cpu")
    total = sum(len(ids) - start for ids, start in texts)
    bar = tqdm(total=total, unit_scale=True, delay=0.1, disable=None, leave=False)  # after attention's line
    while batch := list(islice(windows, batch_size)):
        cpu_threads.share()
        owners, inputs, targets = (pad_sequence(rows, True, -100) for rows in zip(*batch, strict=True))  # [B, T]
        scored = targets >= 0
        owners, targets = owners[scored], targets[scored].to(device)
        with autocast("auto", device.type):
            hidden = model.hidden(inputs.clamp(min=0).to(device))[scored.to(device)]  # [N, C]
            for part in zip(hidden.split(CHUNK), targets.split(CHUNK), owners.split(CHUNK), strict=True):
                states, expected, owner = part
                logits = model.logits(states)
                likelihoods.index_add_(0, owner, -F.cross_entropy(logits, expected, reduction="none").cpu().double())
                misses.index_add_(0, owner, (logits.argmax(-1) != expected).cpu().double())
        bar.update(len(targets))
    bar.close()
    if likelihoods.isnan().any():
        refuse_nan(model, f"text {int(likelihoods.isnan().nonzero()[0]) + 1}")
    return likelihoods.tolist(), (misses == 0).tolist()


def _windows(texts, block_size, stride):
    """Yield (number of the text, inputs, targets) of each window, [T] int64 each; targets that are not scored are -100.

    All windows of a text have the same length. The longest are first, so that a batch has little padding.
    """
    for number in sorted(range(len(texts)), key=lambda number: -min(len(texts[number][0]), block_size + 1)):
        ids, start = texts[number]
        while start < len(ids):
            end = min(max(start + (stride or block_size), block_size + 1), len(ids))
            window = torch.from_numpy(ids[max(0, end - block_size - 1) : end].astype(np.int64))
            targets = window[1:].clone()
            targets[: start - end] = -100
            yield torch.full_like(targets, number), window[:-1], targets
            start = end


@torch.inference_mode()
def _loss_of_answers(model, windows, batch_size):
    """Nats per token of the answers in data.chat.Windows; no conversation sees another one, as with configs/chat.py."""
    config, device, total = model.config, model.embed.weight.device, 0.0
    batches = validation_batches(windows, config.block_size, batch_size)
    model.config = replace(config, mask_documents=True, end_of_text=windows.turns.end_of_text)  # exports lack them
    for batch in tqdm(batches, delay=0.1, disable=None, leave=False):
        inputs, targets = batch()
        with autocast("auto", device.type):
            loss = model(inputs.to(device), targets.to(device))
        total += loss.item() * int((targets >= 0).sum())
    model.config = config
    if math.isnan(total):
        refuse_nan(model, "an answer")
    return total / windows.counted


def evaluate_text(model, tokens, *, stride, batch_size):
    """Nats per token, perplexity and bits per byte of data.shards.Tokens; of conversations, as in training."""
    if tokens.turns:
        tokens = windowed(tokens, model.config.block_size)
        loss = _loss_of_answers(model, tokens, batch_size)
    else:
        loss = -score(model, [(tokens, 1)], batch_size, stride)[0][0] / (len(tokens) - 1)
    bits = loss / math.log(2) * tokens.counted / tokens.text_bytes  # as training.report counts
    counts = dict(tokens=tokens.counted, bytes=tokens.text_bytes)
    return dict(loss=loss, perplexity=float(np.exp(loss)), bits_per_byte=bits) | counts
