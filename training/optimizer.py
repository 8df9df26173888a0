"""The optimizer of a run: AdamW or Muon, and what surrounds their step."""

import math
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn.utils import get_total_norm

from attention.gpu import takes_kernels
from attention.ops import may_launch
from device import resolve_dtype
from errors import UserError, quote, require
from kernels.fp8 import Scales
from training.fsdp import local, on_whole_matrices, spread_like

MOMENTUM = 0.95  # of Muon
QUINTIC = 3.4445, -4.7750, 2.0315  # a, b, c: a x + b x^3 + c x^5, repeated, moves singular values in (0, 1] close to 1
BATCH_ELEMENTS = 1 << 26  # elements of matrices that take a step together; it bounds the memory for temporaries


class Optimizer:
    """AdamW or Muon with what surrounds its step: loss scaling, clipping, skipped steps and the running average.

    A step whose loss or gradient norm is not finite is skipped: weights and moments stay as they are. On a CUDA GPU all
    of this happens on the device, so that the host never waits.

    Attributes:
        inner: AdamW or Muon, a torch.optim.Optimizer.
        scale: function that multiplies a loss by float16's scale; with other dtypes it returns the loss.
        zero_grad: that of inner.
        skipped, bad_in_row: [] float32, steps skipped since the run began, and most recently in a row.
    """

    def __init__(self, model, config, ranks):
        self.config, self.ranks = config, ranks
        self.parameters = list(model.parameters())
        self.inner = make_inner(model, config, ranks)
        self.set_rate(config.learning_rate)
        kind = torch.device(ranks.device).type
        self.scaler = torch.amp.GradScaler(kind, enabled=resolve_dtype(config.dtype, ranks.device) == torch.float16)
        self.scale, self.zero_grad = self.scaler.scale, self.inner.zero_grad
        self.fp8_scales = Scales(model) if config.fp8 else None
        self.skipped, self.bad_in_row = torch.zeros(2, device=ranks.device).unbind()

    def set_rate(self, rate):
        """Give every group this learning rate, times the group's own factor `relative`."""
        for group in self.inner.param_groups:
            own = rate * group["relative"]
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(own)
            else:
                group["lr"] = own

    def begin(self):
        """Before the forward passes of a step."""
        if self.fp8_scales:
            self.fp8_scales.begin()

    @torch.no_grad()
    def step(self, loss):
        """Update the weights, or skip the step; returns the norm of the gradient. loss: [], of all ranks."""
        if self.fp8_scales:
            self.fp8_scales.end(self.ranks.world)
        self.scaler.unscale_(self.inner)  # no scaler.step() follows: what it would skip is skipped below
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        grad_norm = get_total_norm(gradients)
        if self.ranks.sharded:
            grad_norm = grad_norm.full_tensor()
        divisor = ((grad_norm + 1e-6) / (self.config.grad_clip or math.inf)).clamp(min=1.0)  # of clipping
        # After max_bad_steps in a row, all further steps are skipped too, so that check_bad_steps() cannot miss them.
        bad = ~(loss.isfinite() & grad_norm.isfinite()) | (self.bad_in_row >= self.config.max_bad_steps)
        self.bad_in_row.add_(1).mul_(bad)  # 0 after a good step
        self.skipped.add_(bad)
        if self.inner.defaults["capturable"]:
            # torch's fused kernels define these two: they divide gradients by grad_scale, and do nothing if found_inf
            self.inner.grad_scale, self.inner.found_inf = divisor, bad.float()
            self.inner.step()
        elif not bad:  # other kernels may ignore both, as those for MPS do before PyTorch 2.15
            torch._foreach_div_(local(gradients) if self.ranks.sharded else gradients, divisor)
            self.inner.step()
        self.scaler.update()
        return grad_norm

    @torch.no_grad()
    def move_average(self, step):
        """After step number `step`, move the running averages: average = decay average + (1 - decay) parameter.

        They begin after the first step, and are part of the optimizer's state, so that checkpoints have them. The decay
        is at most (1 + step) / (10 + step): with a larger one, early averages are mostly the first weights.
        """
        state = self.inner.state
        if not (self.config.ema and state):  # on a CPU there is none until a step is not skipped
            return
        for p, own in state.items():
            if "average" not in own:
                own["average"] = p.detach().clone()
        averages, weights = [own["average"] for own in state.values()], list(state)
        if self.ranks.sharded:
            averages, weights = local(averages), local(weights)
        torch._foreach_lerp_(averages, weights, 1 - min(self.config.ema, (1 + step) / (10 + step)))

    @contextmanager
    def averaged(self):
        """The context in which parameters and their averages, if there are any, have changed places."""
        found = [(p, own["average"]) for p, own in self.inner.state.items() if "average" in own]
        weights, averages = map(local, zip(*found, strict=True)) if found else ([], [])

        @torch.no_grad()
        def swap():
            for weight, average in zip(weights, averages, strict=True):
                before = weight.clone()
                weight.copy_(average)
                average.copy_(before)

        swap()
        try:
            yield
        finally:
            swap()

    def check_bad_steps(self, step, batches, folder):
        """UserError if the last max_bad_steps before `step` were skipped. Waits for the device."""
        bad, rate = int(self.bad_in_row), self.config.learning_rate / 2
        if bad >= self.config.max_bad_steps:
            least = f" --min_learning_rate {rate:g}" if rate < self.config.min_learning_rate else ""
            raise UserError(
                f"loss or gradient norm were not finite in {bad} steps in a row, from step {step - bad + 1} on: "
                f"{batches.describe(step - bad)}; look at that batch, or resume with a lower rate: "
                f"--resume {quote(folder)} --learning_rate {rate:g}{least} --allow_changes"
            )

    def state(self):
        """What a checkpoint holds of it: tensors and plain values by name."""
        counters = dict(skipped=self.skipped, scaler=self.scaler.state_dict())
        counters |= {"fp8_history": self.fp8_scales.history} if self.fp8_scales else {}
        return dict(optimizer=self.inner.state_dict(), counters=counters)

    def load(self, contents):
        """Take over the state() in a checkpoint; UserError if it is of another optimizer."""
        groups, state, counters = self.inner.state_dict()["param_groups"], contents["optimizer"], contents["counters"]
        sizes = [[len(group["params"]) for group in each] for each in (state["param_groups"], groups)]
        require(sizes[0] == sizes[1], "the run was trained with another --optimizer; change it back")
        parameters = [p for group in self.inner.param_groups for p in group["params"]]
        moments = {
            index: {
                name: spread_like(parameters[index], value)
                for name, value in values.items()
                if name != "average" or self.config.ema
            }
            for index, values in state["state"].items()
        }
        # the rates and other options of this process count, not the checkpoint's
        self.inner.load_state_dict({"state": moments, "param_groups": groups})
        if counters["scaler"]:  # only float16 has one
            self.scaler.load_state_dict(counters["scaler"])
        if self.fp8_scales and "fp8_history" in counters:  # a run without --fp8 has none
            self.fp8_scales.load(counters["fp8_history"])
        self.skipped.copy_(counters["skipped"])


def make_inner(model, config, ranks):
    """AdamW or Muon for a model, whose rates are 0."""
    groups = parameter_groups(model, config)
    for group in groups:  # a tensor on the GPU, so that a CUDA graph reads the current value
        group["lr"] = torch.zeros((), device=ranks.device) if ranks.on_gpu else 0.0
    kind = Muon if config.optimizer == "muon" else torch.optim.AdamW
    # fused: fast, and on a CUDA GPU it clips and skips by its grad_scale and found_inf, so that the host never waits
    return kind(groups, betas=(0.9, config.beta2), fused=True, capturable=ranks.on_gpu)


def parameter_groups(model, config):
    """Groups of a GPT's parameters, each with its weight decay and its rate relative to learning_rate.

    kind="muon" are the matrices of the blocks, if the optimizer is Muon. Their `heights` are the rows of the matrices
    that each is made of: q, k and v in one.
    """
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2] if config.optimizer == "muon" else []
    heads = {block.attention.qkv.weight: block.attention.heads for block in model.blocks}
    heights = [[count * model.config.head_dim for count in heads[p]] if p in heads else [len(p)] for p in matrices]
    apart = set(matrices)
    others = [p for p in model.parameters() if p not in apart]
    groups = [
        dict(params=[p for p in others if p.dim() >= 2], weight_decay=config.weight_decay),
        dict(params=[p for p in others if p.dim() < 2], weight_decay=0.0),
    ]
    if matrices:
        own = dict(kind="muon", relative=config.muon_scale, momentum=MOMENTUM, heights=heights)
        groups.append(dict(params=matrices, weight_decay=config.weight_decay, **own))
    return [dict(kind="adamw", relative=1.0) | group for group in groups]


class Muon(torch.optim.AdamW):
    """Muon for parameter groups of kind="muon", whose parameters must be matrices; AdamW for the other groups.

    The "lr" of a Muon group is on AdamW's scale: the entries of a step have a root mean square of 0.2 lr. Its "heights"
    have a list of numbers of rows for each parameter, which is split into matrices of so many rows, none taller than
    wide if there are several. Parameters of one shape take a step together, which ends with their gradients None.
    Gradients are divided by `grad_scale`, and if `found_inf` is 1, nothing changes: both as in a fused AdamW.

    Sources: Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks (step and coefficients); Liu et
    al. 2025, Muon is scalable for LLM training, section 2.2 (size of a step).
    """

    def __setstate__(self, state):
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's version expects a step count for each parameter

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if group["kind"] != "muon":
                continue
            alike = {}  # (shape, heights) -> parameters
            for p, heights in zip(group["params"], group["heights"], strict=True):
                if p.grad is not None:
                    alike.setdefault((p.shape, *heights), []).append(p)
            for (shape, *heights), some in alike.items():
                together = max(1, BATCH_ELEMENTS // shape.numel())
                for first in range(0, len(some), together):
                    self._step_together(some[first : first + together], heights, group)
        super().step()  # of the parameters that still have a gradient

    def _step_together(self, parameters, heights, group):
        """Muon's step for parameters of one shape and with the same heights; of spread ones, for this rank's rows."""
        scale, skip, like = getattr(self, "grad_scale", None), getattr(self, "found_inf", None), parameters[0]
        weights, gradients = [*parameters], [p.grad for p in parameters]
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            p.grad = None  # so that AdamW skips it
        momenta = [self.state[p]["momentum"] for p in parameters]
        orthogonalise = partial(orthogonal, heights=heights)
        if hasattr(like, "placements"):  # a DTensor of FSDP
            weights, momenta, gradients = local(weights), local(momenta), local(gradients)
            orthogonalise = partial(on_whole_matrices, orthogonalise, parameter=like)
        dtype = torch.bfloat16 if like.is_cuda else like.dtype
        blended = weights[0].new_empty(len(weights), *weights[0].shape, dtype=dtype)
        for momentum, gradient, out in zip(momenta, gradients, blended, strict=True):
            blend(momentum, gradient, out, 1 - group["momentum"], scale, skip)
        size = 0.2 * math.sqrt(max(*heights, like.shape[1]))  # RMS of a direction: 1 / sqrt(larger side)
        for weight, direction in zip(weights, orthogonalise(blended), strict=True):
            update(weight, direction, group["lr"], size, group["weight_decay"], skip)


def blend(momentum, gradient, out, fraction, scale, skip):
    """momentum += fraction (g - momentum), then out = momentum + fraction (g - momentum), where g = gradient / scale.

    scale: a scalar tensor, or None for 1. skip: if it is 1, the momentum stays as it was; or None.
    """
    if momentum.is_cuda and takes_kernels(momentum.device) and may_launch(momentum, gradient, out, scale, skip):
        from kernels import muon  # imports Triton, which not every machine has

        return muon.blend(momentum, gradient, out, fraction, scale, skip)
    gradient = gradient if scale is None else gradient / scale
    new = momentum.lerp(gradient, fraction)
    out.copy_(new.lerp(gradient, fraction))
    momentum.copy_(new if skip is None else torch.where(skip > 0, momentum, new))


def update(weight, direction, rate, size, decay, skip):
    """weight -= rate (size direction + decay weight).

    rate: a number, on a GPU a scalar tensor. skip: if it is 1, the weight stays; or None.
    """
    if weight.is_cuda and takes_kernels(weight.device) and may_launch(weight, direction, rate, skip):
        from kernels import muon

        return muon.update(weight, direction, rate, size, decay, skip)
    new = weight - rate * (size * direction.to(weight.dtype) + decay * weight)
    weight.copy_(new if skip is None else torch.where(skip > 0, weight, new))


def orthogonal(matrices, heights=None):
    """Matrices [n, rows, columns] with their singular values moved close to 1, by five Newton-Schulz iterations.

    heights: numbers of rows, as many as each is to be cut into; None takes it whole.
    """
    directions = []
    for x in matrices.split(heights or matrices.shape[1], dim=1):
        tall = x.shape[1] > x.shape[2]
        x = x.mT if tall else x  # so that x @ x.mT is the smaller product
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # which may be 0
        a, b, c = QUINTIC
        for _ in range(5):
            square = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
        directions.append(x.mT if tall else x)
    return torch.cat(directions, dim=1)
