"""The optimizer of a run, AdamW or --optimizer muon, whose steps in the blocks are orthogonal, and its rate."""

import math
from functools import partial

import torch

from shard import Sharded

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a quintic that brings singular values in (0, 1] near 1
ROUNDS = 5
AT_ONCE = 1 << 26  # elements of matrices that take a step together, which holds some ten times as many


def make_optimizer(model, config, distributed):
    """The optimizer of a model; each rank holds its share of the state if that is asked for."""
    on_gpu = distributed.device.startswith("cuda")

    def rate(value):  # on the device, where a CUDA graph sees it change
        return torch.tensor(value, dtype=torch.float32, device=distributed.device) if on_gpu else value

    of_blocks = {}
    if config.optimizer == "muon":
        scale = config.muon_scale
        of_blocks = dict(momentum=config.muon_momentum, lr=rate(scale * config.learning_rate), relative=scale)
    make = partial(
        Muon if of_blocks else torch.optim.AdamW,
        lr=rate(config.learning_rate),
        betas=(config.beta1, config.beta2),
        fused=True,  # fast, and skips a step on the device where its found_inf is 1
        capturable=on_gpu,
    )
    groups = model.parameter_groups(config.weight_decay, **of_blocks)
    if config.shard_optimizer and distributed.world > 1:
        return Sharded(make, groups, distributed.rank, distributed.world)
    return make(groups)


def learning_rate(step, config):
    """Rate of a step: linear warm-up, then cosine, or stable and linear decay (wsd), down to min_learning_rate."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    progress = min((step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1), 1.0)
    if config.schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        left = 1 - step / config.steps
        share = min(left / config.decay_fraction, 1.0) if config.decay_fraction > 0 else 1.0
    return config.min_learning_rate + share * (config.learning_rate - config.min_learning_rate)


def set_learning_rate(optimizer, rate):
    """Give every group this rate, times its own `relative` if it has one."""
    for group in optimizer.param_groups:
        own = rate * group.get("relative", 1.0)
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


class Muon(torch.optim.AdamW):
    """AdamW, but for groups with a "momentum", whose matrices take Muon's step.

    Such a group's "lr" is on AdamW's scale: entries of a step have the root mean square 0.2 lr. A matrix that has
    `parts`, numbers of rows, is taken for several. All of one shape are orthogonalised together. Where `found_inf` is
    1, as for a fused AdamW, weights and momenta stay as they are.

    Source: Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks, for the step and its
    coefficients; Liu et al. 2025, Muon is scalable for LLM training, section 2.2, for its size.
    """

    def __setstate__(self, state):
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's looks for a step count of each parameter

    @torch.no_grad()
    def step(self):
        gradients = {}
        for group in self.param_groups:
            if "momentum" in group:
                own = [p for p in group["params"] if p.grad is not None]
                self._step(own, group)
                gradients |= {p: p.grad for p in own}
        for p in gradients:
            p.grad = None  # which AdamW leaves alone
        super().step()
        for p, gradient in gradients.items():
            p.grad = gradient

    def _step(self, parameters, group):
        shapes = {}  # shape -> (weight, momentum, gradient) of each matrix
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            parts = getattr(p, "parts", len(p))
            for matrix in zip(*(x.split(parts) for x in (p, self.state[p]["momentum"], p.grad)), strict=True):
                shapes.setdefault(matrix[0].shape, []).append(matrix)
        for shape, alike in shapes.items():
            together = max(1, AT_ONCE // math.prod(shape))
            for first in range(0, len(alike), together):
                self._step_together(alike[first : first + together], group)

    def _step_together(self, matrices, group):
        """The step of matrices of one shape."""
        weights, momenta, gradients = zip(*matrices, strict=True)
        weight, momentum, gradient = torch.stack(weights), torch.stack(momenta), torch.stack(gradients)
        new_momentum = momentum.lerp(gradient, 1 - group["momentum"])
        direction = orthogonal(new_momentum.lerp(gradient, 1 - group["momentum"]))  # Nesterov's
        rms = 0.2 * math.sqrt(max(weight.shape[1:]))  # entries of an orthogonal matrix have 1 / sqrt(the larger)
        new_weight = weight - group["lr"] * (rms * direction + group["weight_decay"] * weight)
        skip = getattr(self, "found_inf", None)
        if skip is not None:
            new_weight = torch.where(skip > 0, weight, new_weight)
            new_momentum = torch.where(skip > 0, momentum, new_momentum)
        for old, new in zip((*weights, *momenta), (*new_weight, *new_momentum), strict=True):
            old.copy_(new)


def orthogonal(matrices):
    """Of [n, rows, columns] about the nearest matrices with orthonormal rows or columns: singular values near 1."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT  # the smaller product
    if x.is_cuda:
        x = x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x if wide else x.mT).to(matrices.dtype)
