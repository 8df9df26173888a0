"""The optimizer of a run, AdamW or Muon, and the learning rate of each step."""

import inspect
import math
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from attention.gpu import HAS_TRITON
from attention.ops import may_launch
from device import resolve_dtype
from errors import quote, require
from kernels.fp8 import Scales
from training.fsdp import gather, is_spread, local, on_whole_matrices, spread_like

MOMENTUM = 0.95  # of Muon
QUINTIC = 3.4445, -4.7750, 2.0315  # a, b, c: a x + b x^3 + c x^5, repeated, moves singular values in (0, 1] close to 1
BATCH_ELEMENTS = 1 << 26  # elements of matrices that take a step together; it bounds the memory for temporaries


class Optimizer:
    """AdamW or Muon with what surrounds its step: loss scaling, clipping, skipped steps and the running average.

    A step whose loss or gradient norm is not finite is skipped: weights and moments stay as they are. On a CUDA GPU all
    of this happens on the device, so that the host never waits.

    Attributes:
        inner: AdamW or Muon, a torch.optim.Optimizer.
        skipped, bad_in_row: [] float32, steps skipped since the run began, and most recently in a row.
    """

    def __init__(self, model, config, ranks):
        self.config, self.ranks = config, ranks
        self.parameters = list(model.parameters())
        self.inner = make_inner(model, config, ranks)
        self.set_rate(config.learning_rate)
        kind = torch.device(ranks.device).type
        self.scaler = torch.amp.GradScaler(kind, enabled=resolve_dtype(config.dtype, ranks.device) == torch.float16)
        self.fp8_scales = Scales(model) if config.fp8 else None
        self.skipped, self.bad_in_row = torch.zeros(2, device=ranks.device).unbind()

    def set_rate(self, rate):
        """Give every group this learning rate, times the group's own factor `relative` if it has one."""
        for group in self.inner.param_groups:
            own = rate * group.get("relative", 1.0)
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(own)
            else:
                group["lr"] = own

    def begin(self):
        """Before the forward passes of a step."""
        if self.fp8_scales:
            self.fp8_scales.begin()

    def backward(self, part):
        """Add the gradients of a part of the loss; the parts of all ranks add up to the loss."""
        if self.ranks.world > 1:
            part = part * self.ranks.world  # DDP and FSDP take the mean of the ranks
        self.scaler.scale(part).backward()

    @torch.no_grad()
    def step(self, loss):
        """Update the weights; returns the norm of the gradient. loss: of this rank, in place that of all ranks."""
        if self.ranks.world > 1:
            dist.all_reduce(loss)
        if self.fp8_scales:
            self.fp8_scales.end(self.ranks.world)
        self.scaler.unscale_(self.inner)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        grad_norm = gather(get_total_norm(gradients))
        scale = ((grad_norm + 1e-6) / (self.config.grad_clip or math.inf)).clamp(min=1.0)
        # After max_bad_steps in a row, all further steps are skipped too, so that check_bad_steps() cannot miss them.
        bad = ~(loss.isfinite() & grad_norm.isfinite()) | (self.bad_in_row >= self.config.max_bad_steps)
        self.bad_in_row.add_(1).mul_(bad)
        self.skipped.add_(bad)
        if self.inner.defaults["capturable"]:
            # The optimizer divides the gradients by the one as it reads them, and does nothing where the other is 1.
            self.inner.grad_scale, self.inner.found_inf = scale, bad.float()
            self.inner.step()
        elif not bad:  # other optimizers may ignore both, as that for MPS does before PyTorch 2.15
            torch._foreach_div_([local(gradient) for gradient in gradients], scale)
            self.inner.step()
        self.scaler.update()
        return grad_norm

    def zero_grad(self):
        self.inner.zero_grad(set_to_none=True)

    @torch.no_grad()
    def move_average(self, step):
        """After step number `step`, move the running averages: average = decay average + (1 - decay) parameter.

        They begin after the first step, and are part of the optimizer's state, so that checkpoints have them. The decay
        is at most (1 + step) / (10 + step): with a larger one, early averages are mostly the first weights.
        """
        state = self.inner.state
        if not (self.config.ema and state):  # there is none if all steps so far were skipped
            return
        for p, own in state.items():
            if "average" not in own:
                own["average"] = p.detach().clone()
        pairs = [[local(own["average"]) for own in state.values()], [local(p) for p in state]]
        torch._foreach_lerp_(*pairs, 1 - min(self.config.ema, (1 + step) / (10 + step)))

    @contextmanager
    def averaged(self):
        """The context in which parameters and their averages, if there are any, have changed places."""
        pairs = [(p, state["average"]) for p, state in self.inner.state.items() if "average" in state]

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

    def check_bad_steps(self, step, batches, folder):
        """UserError if the last max_bad_steps before `step` were skipped. Waits for the device."""
        bad, rate = int(self.bad_in_row), self.config.learning_rate / 2
        least = f" --min_learning_rate {rate:g}" if rate < self.config.min_learning_rate else ""
        require(
            bad < self.config.max_bad_steps,
            f"loss or gradient norm were not finite in {bad} steps in a row, from step {step - bad + 1} on: "
            f"{batches.describe(step - bad)}; look at that batch, or resume with a lower rate: "
            f"--resume {quote(folder)} --learning_rate {rate:g}{least} --allow_changes",
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
        require(sizes[0] == sizes[1], "the run was trained with another --optimizer or --embed_scale; change it back")
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
    kind = Muon if config.optimizer == "muon" else AdamW
    # fused: fast, and on a CUDA GPU it clips and skips by its grad_scale and found_inf, so that the host never waits
    return kind(groups, betas=(0.9, config.beta2), fused=True, capturable=ranks.on_gpu)


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
            attention = block.attention
            attention.qkv.weight.heights = [heads * model.config.head_dim for heads in attention.heads]
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


def learning_rate(step, config):
    """Learning rate of a step: linear warm-up, then cosine decay, or constant with a linear cooldown at the end."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.cooldown > 0:
        fraction = min((1 - step / config.steps) / config.cooldown, 1.0)
    else:
        progress = min((step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1), 1.0)
        fraction = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_learning_rate + fraction * (config.learning_rate - config.min_learning_rate)


def note_new_rate(saved, config):
    """Print if the options of a resumed run change the learning rate of its next step, as more --steps do.

    saved: contents of the checkpoint. config: Config of the resumed run.
    """
    step = saved["step"]
    old, new = (f"{learning_rate(step, each):.2g}" for each in (SimpleNamespace(**saved["config"]), config))
    if old != new:
        print(f"note: the learning rate of step {step} changes from {old} to {new}", file=sys.stderr)


class AdamW(torch.optim.AdamW):
    """torch's AdamW without decorators, which import torch._dynamo: that takes seconds, and not every run needs it."""

    step, add_param_group, zero_grad, state_dict, load_state_dict = (
        inspect.unwrap(getattr(torch.optim.AdamW, name))
        for name in ("step", "add_param_group", "zero_grad", "state_dict", "load_state_dict")
    )


class Muon(AdamW):
    """Muon for parameter groups with a "momentum", whose parameters must be matrices; AdamW for the other groups.

    The "lr" of a Muon group is on AdamW's scale: the entries of a step have a root mean square of 0.2 lr. A parameter
    with the attribute `heights`, numbers of rows, is split into that many matrices (q, k and v), none taller than wide.
    Parameters of one shape take a step together, which ends with their gradients None. Gradients are divided by
    `grad_scale`, and if `found_inf` is 1, nothing changes: both as in a fused AdamW.

    Sources: Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks (step and coefficients); Liu et
    al. 2025, Muon is scalable for LLM training, section 2.2 (size of a step).
    """

    def __setstate__(self, state):
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's version expects a step count for each parameter

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if "momentum" in group:
                own = [p for p in group["params"] if p.grad is not None]
                self._step(own, group)
                for p in own:
                    p.grad = None  # so that AdamW skips it
        super().step()

    def _step(self, parameters, group):
        alike = {}  # shape and heights -> parameters
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            alike.setdefault((p.shape, *getattr(p, "heights", ())), []).append(p)
        for (shape, *_), some in alike.items():
            together = max(1, BATCH_ELEMENTS // shape.numel())
            for first in range(0, len(some), together):
                self._step_together(some[first : first + together], group)

    def _step_together(self, parameters, group):
        """Muon's step for parameters of one shape and with the same heights; of spread ones, for this rank's rows."""
        weights, like = [local(p) for p in parameters], parameters[0]
        momenta = [local(self.state[p]["momentum"]) for p in parameters]
        gradients = [local(p.grad) for p in parameters]
        dtype = torch.bfloat16 if weights[0].is_cuda else weights[0].dtype
        blended = weights[0].new_empty(len(weights), *weights[0].shape, dtype=dtype)
        skip = getattr(self, "found_inf", None)
        for momentum, gradient, out in zip(momenta, gradients, blended, strict=True):
            blend(momentum, gradient, out, 1 - group["momentum"], getattr(self, "grad_scale", None), skip)
        heights = getattr(like, "heights", [len(like)])

        def each_orthogonal(matrices):
            return torch.cat([orthogonal(matrix) for matrix in matrices.split(heights, dim=1)], dim=1)

        directions = on_whole_matrices(each_orthogonal, blended, like) if is_spread(like) else each_orthogonal(blended)
        size = 0.2 * math.sqrt(max(*heights, like.shape[1]))  # RMS of a direction: 1 / sqrt(larger side)
        for weight, direction in zip(weights, directions, strict=True):
            update(weight, direction, group["lr"], size, group["weight_decay"], skip)


def blend(momentum, gradient, out, fraction, scale, skip):
    """momentum += fraction (g - momentum), then out = momentum + fraction (g - momentum), where g = gradient / scale.

    scale: a scalar tensor, or None for 1. skip: if it is 1, the momentum stays as it was; or None.
    """
    if momentum.is_cuda and HAS_TRITON and may_launch(momentum, gradient, out, scale, skip):
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
    if weight.is_cuda and HAS_TRITON and may_launch(weight, direction, rate, skip):
        from kernels import muon

        return muon.update(weight, direction, rate, size, decay, skip)
    new = weight - rate * (size * direction.to(weight.dtype) + decay * weight)
    weight.copy_(new if skip is None else torch.where(skip > 0, weight, new))


def orthogonal(matrices):
    """Matrices [n, rows, columns] with their singular values moved close to 1, by five Newton-Schulz iterations."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT  # so that x @ x.mT is the smaller product
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # which may be 0
    a, b, c = QUINTIC
    for _ in range(5):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
