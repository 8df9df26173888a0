"""The head of the network and the cross-entropy of its logits, in one kernel where a GPU has Triton."""

import torch
import torch.nn.functional as F

from attention.gpu import takes_kernels


def head_logits(hidden, head, softcap):
    """Float32 logits [..., V] of hidden states [..., C]; softcap * tanh(logits / softcap) unless that is None."""
    logits = head(hidden).float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def head_loss(hidden, head, targets, softcap):
    """Mean cross-entropy in nats of hidden states [N, C] for those of targets [N] that are not -100; 0 without any.

    head: nn.Linear from C to V.
    """
    if hidden.is_cuda and takes_kernels(hidden.device):
        from kernels.cross_entropy import linear_cross_entropy  # imports Triton, which not every machine has

        return linear_cross_entropy(hidden, head.weight, targets, softcap, head)
    total = F.cross_entropy(head_logits(hidden, head, softcap), targets, reduction="sum")
    return total / (targets >= 0).sum().clamp(min=1)
