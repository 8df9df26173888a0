"""The optimizer of a run, AdamW or Muon, and the learning rate of each step."""

import inspect
import math
from contextlib import contextmanager

import torch

from model import HAS_TRITON
from training.fsdp import is_spread, local, on_whole

MOMENTUM = 0.95  # of Muon
TINY = 1e-7  # added to divisors that may be 0
QUINTIC = 3.4445, -4.7750, 2.0315  # a, b, c: a x + b x^3 + c x^5, repeated, moves singular values in (0, 1] close to 1
BATCH_ELEMENTS = 1 << 26  # elements of matrices that take a step together; it bounds the memory for temporaries


def make_optimizer(model, config, ranks):
    """AdamW or Muon for a model."""
    on_gpu = ranks.on_gpu and not config.cpu_offload

    def rate(value):  # a tensor on the GPU, so that a CUDA graph reads the current value
        return torch.tensor(value, dtype=torch.float32, device=ranks.device) if on_gpu else value

    groups = parameter_groups(model, config)
    for group in groups:
        if "relative" in group:
            group["lr"] = rate(group["relative"] * config.learning_rate)
    kind = Muon if config.optimizer == "muon" else AdamW
    # fused: fast, and skips a step on the device where its found_inf is 1
    return kind(groups, rate(config.learning_rate), (0.9, config.beta2), fused=True, capturable=on_gpu)


def parameter_groups(model, config):
    """Groups of a GPT's parameters: matrices with weight decay, norms and other vectors without.

    Muon's matrices have their own group. So do embeddings if their rate differs (`relative`).
    """
    special = []
    if config.embed_scale != 1:
        embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        special.append((embeddings, dict(relative=config.embed_scale)))
    if config.optimizer == "muon":
        for block in model.blocks:  # q, k and v are matrices of their own
            block.attention.qkv.weight.parts = block.attention.rows
        matrices = {p for p in model.blocks.parameters() if p.dim() == 2}
        special.append((matrices, dict(momentum=MOMENTUM, relative=config.muon_scale)))
    others = [p for p in model.parameters() if not any(p in some for some, _ in special)]
    return [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ] + [
        {"params": [p for p in model.parameters() if p in some], "weight_decay": config.weight_decay, **options}
        for some, options in special
    ]


def moment_bytes(model, config):
    """Bytes that the optimizer keeps for a whole GPT: one float32 moment per element of Muon's matrices, else two.

    And one for the average of config.ema.
    """
    groups, ema = parameter_groups(model, config), config.ema > 0
    return sum(4 * p.numel() * (ema + (1 if "momentum" in group else 2)) for group in groups for p in group["params"])


def learning_rate(step, config):
    """Learning rate of a step: linear warm-up, then cosine decay, or constant with a linear cooldown at the end."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.cooldown > 0:
        share = min((1 - step / config.steps) / config.cooldown, 1.0)
    else:
        progress = min((step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1), 1.0)
        share = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_learning_rate + share * (config.learning_rate - config.min_learning_rate)


def set_learning_rate(optimizer, rate):
    """Give every group this rate, times the group's own factor `relative` if it has one."""
    for group in optimizer.param_groups:
        own = rate * group.get("relative", 1.0)
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


@torch.no_grad()
def move_average(optimizer, decay):
    """Move the running averages of the parameters: average = decay average + (1 - decay) parameter.

    They begin after the first step, and are part of the optimizer's state, so that checkpoints have them.
    """
    for p, state in optimizer.state.items():
        if "average" not in state:
            state["average"] = p.detach().clone()
    averages, weights = zip(*((local(state["average"]), local(p)) for p, state in optimizer.state.items()), strict=True)
    torch._foreach_lerp_(averages, weights, 1 - decay)


@contextmanager
def averaged(optimizer):
    """The context in which parameters and their averages, if there are any, have changed places."""
    pairs = [(p, state["average"]) for p, state in optimizer.state.items() if "average" in state]

    @torch.no_grad()
    def swap():
        for pair in pairs:
            weight, average = map(local, pair)
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)

    swap()
    try:
        yield
    finally:
        swap()


def without_dynamo(name):
    """A method of torch's AdamW without its decorators, which would import torch._dynamo."""
    return inspect.unwrap(getattr(torch.optim.AdamW, name))


class AdamW(torch.optim.AdamW):
    """torch's AdamW, not traced by Dynamo. Importing torch._dynamo takes seconds, and not every run needs it."""

    step = torch.no_grad()(without_dynamo("step"))
    add_param_group, zero_grad = without_dynamo("add_param_group"), without_dynamo("zero_grad")
    state_dict, load_state_dict = without_dynamo("state_dict"), without_dynamo("load_state_dict")


class Muon(AdamW):
    """Muon for parameter groups with a "momentum", whose parameters must be matrices; AdamW for the other groups.

    The "lr" of a Muon group is on AdamW's scale: the entries of a step have a root mean square of 0.2 lr. A parameter
    with the attribute `parts`, numbers of rows, is split into that many matrices (q, k and v), none taller than wide.
    Parameters of one shape take a step together; if FSDP spreads them, their whole matrices are divided over the
    ranks. Gradients are divided by `grad_scale`, and if `found_inf` is 1, nothing changes: both as in a fused AdamW.

    Sources: Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks (step and coefficients); Liu et
    al. 2025, Muon is scalable for LLM training, section 2.2 (size of a step).
    """

    def __setstate__(self, state):
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's version expects a step count for each parameter

    @torch.no_grad()
    def step(self):
        gradients = {}
        for group in self.param_groups:
            if "momentum" in group:
                own = [p for p in group["params"] if p.grad is not None]
                self._step(own, group)
                gradients |= {p: p.grad for p in own}
        for p in gradients:
            p.grad = None  # so that AdamW skips it
        super().step()
        for p, gradient in gradients.items():
            p.grad = gradient

    def _step(self, parameters, group):
        alike = {}  # shape and parts -> parameters
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            alike.setdefault((p.shape, *getattr(p, "parts", ())), []).append(p)
        for (shape, *_), some in alike.items():
            ranks = some[0].device_mesh.size() if is_spread(some[0]) else 1
            together = max(1, BATCH_ELEMENTS // shape.numel()) * ranks
            for first in range(0, len(some), together):
                self._step_together(some[first : first + together], group)

    def _step_together(self, parameters, group):
        """Muon's step for parameters of one shape and with the same parts; of spread ones, for this rank's rows."""
        state, like = [self.state[p] for p in parameters], parameters[0]
        weights, momenta, gradients = (
            [local(x) for x in each]
            for each in (parameters, [own["momentum"] for own in state], [p.grad for p in parameters])
        )
        dtype = torch.bfloat16 if weights[0].is_cuda else weights[0].dtype
        blended = weights[0].new_empty(len(weights), *weights[0].shape, dtype=dtype)
        skip = getattr(self, "found_inf", None)
        for momentum, gradient, out in zip(momenta, gradients, blended, strict=True):
            blend(momentum, gradient, out, 1 - group["momentum"], getattr(self, "grad_scale", None), skip)
        parts = getattr(like, "parts", [len(like)])

        def orthogonal_parts(matrices):
            return torch.cat([orthogonal(part) for part in matrices.split(parts, dim=1)], dim=1)

        directions = on_whole(orthogonal_parts, blended, like) if is_spread(like) else orthogonal_parts(blended)
        size = 0.2 * math.sqrt(max(*parts, like.shape[1]))  # RMS of a direction: 1 / sqrt(larger side)
        for weight, direction in zip(weights, directions, strict=True):
            update(weight, direction, group["lr"], size, group["weight_decay"], skip)


def blend(momentum, gradient, out, share, scale, skip):
    """momentum += share (g - momentum), then out = momentum + share (g - momentum), where g = gradient / scale.

    scale: a scalar tensor, or None for 1. skip: if it is 1, the momentum stays as it was; or None.
    """
    if momentum.is_cuda and HAS_TRITON:
        from kernels import muon  # imports Triton, which not every machine has

        return muon.blend(momentum, gradient, out, share, scale, skip)
    gradient = gradient if scale is None else gradient / scale
    new = momentum.lerp(gradient, share)
    out.copy_(new.lerp(gradient, share))
    momentum.copy_(new if skip is None else torch.where(skip > 0, momentum, new))


def update(weight, direction, rate, size, decay, skip):
    """weight -= rate (size direction + decay weight).

    rate: a number, on a GPU a scalar tensor. skip: if it is 1, the weight stays; or None.
    """
    if weight.is_cuda and HAS_TRITON:
        from kernels import muon

        return muon.update(weight, direction, rate, size, decay, skip)
    new = weight - rate * (size * direction.to(weight.dtype) + decay * weight)
    weight.copy_(new if skip is None else torch.where(skip > 0, weight, new))


def orthogonal(matrices):
    """Matrices [n, rows, columns] with their singular values moved close to 1, by five Newton-Schulz iterations."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT  # so that x @ x.mT is the smaller product
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + TINY)
    a, b, c = QUINTIC
    for _ in range(5):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
