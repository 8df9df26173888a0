"""Linear layers that multiply in FP8 while they train: y = x W^T from copies of x and W in e4m3, each with one scale.

GPUs multiply FP8 up to twice as fast as bfloat16. A layer is left alone if making the copies takes the time that this
saves, as in the projection of attention. Gradients are computed in bfloat16: e4m3 is too coarse for them, and Hopper
GPUs multiply FP8 only if the summed dimension is contiguous, so dW would need transposed copies of both operands.

The scale of W is that of its values now. The scale of x comes from its largest values in the last HISTORY steps, so
that the kernel that computes x can write its copy at once (delayed scaling, as in NVIDIA's Transformer Engine). It is
the same in all micro-batches of a step and on all GPUs.

Letters: M tokens, K input width, N output width.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from errors import require

LARGEST = 448.0  # of e4m3
LEAST_SCALE = 1e-15  # kernels divide by the product of two
HISTORY = 16  # steps
MULTIPLE = 16  # K and N on a GPU


def require_fp8(device, dtype):
    """UserError unless a device, given by its name, trains in FP8 beside a torch.dtype."""
    nvidia = device.startswith("cuda") and not torch.version.hip  # e4m3 of AMD's MI300 is another
    capability = torch.cuda.get_device_capability(device) if nvidia else (0, 0)
    found = "compute capability {}.{}".format(*capability) if any(capability) else f"device={device}"
    require(capability >= (8, 9), f"--fp8 needs NVIDIA's compute capability 8.9 or higher, not {found}; leave it out")
    require(dtype == torch.bfloat16, f"--fp8 computes gradients in bfloat16, not {dtype}; give --dtype bfloat16")


def quantise(x, scale):
    """x / scale in e4m3, clamped to its range. Its cast alone would turn larger values into NaN."""
    return (x.detach().float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def find_scale(largest):
    """Scales that map the largest absolute values to that of e4m3; 1 where no value is known."""
    return torch.where(largest > 0, (largest / LARGEST).clamp(min=LEAST_SCALE), 1.0)


def find_largest(x):
    """Largest absolute value, [] float32. By rows first, so that torch.compile fuses it with a norm of the rows."""
    return x.detach().abs().amax(-1).amax().float()


def multiply(x, weight, scale, weight_scale, dtype, bias=None, out=None):
    """x weight^T + bias [M, N], in a dtype, from quantised x [M, K] and weight [N, K]. The formula is the reference."""
    if x.is_cuda:
        options = {} if out is None else {"out": out}
        return torch._scaled_mm(x, weight.T, scale, weight_scale, bias, out_dtype=dtype, use_fast_accum=True, **options)
    with torch.autocast(x.device.type, enabled=False):
        y = (x.float() @ weight.float().T) * (scale * weight_scale)
    y = (y if bias is None else y + bias).to(dtype)
    return y if out is None else out.copy_(y)


class Product(torch.autograd.Function):
    """(W x + b, largest |x|). Gradients are those without quantisation."""

    @staticmethod
    def forward(ctx, x, weight, bias, weight_fp8, scale, weight_scale):
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        columns = len(weight)
        shift = None if bias is None else F.pad(bias, (0, len(weight_fp8) - columns))
        y = multiply(quantise(x, scale), weight_fp8, scale, weight_scale, x.dtype, shift)
        largest = find_largest(x)
        ctx.mark_non_differentiable(largest)
        return y[:, :columns], largest

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.T @ x, dy.sum(0) if ctx.has_bias else None, None, None, None


class Float8Linear(nn.Linear):
    """An nn.Linear, whose parameters it shares, that multiplies in FP8 in training mode.

    In evaluation mode it is that nn.Linear: a validation loss is that of the weights as sample.py will use them.

    Attributes:
        scale, weight_scale: [] float32, of quantised inputs and weights; Scales sets them.
        largest: [] float32, the largest absolute input of this step so far.
    """

    def __init__(self, layer):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        width = self.in_features
        require(width % MULTIPLE == 0, f"--fp8 needs widths that are multiples of {MULTIPLE}, not {width}; see n_embd")
        # not buffers: DDP would copy those of rank 0 to the other ranks in each forward pass
        self.scale, self.weight_scale, self.largest = (torch.ones((), device=layer.weight.device) for _ in range(3))

    def forward(self, x):
        """W x + b; x: [..., K]."""
        if not self.training:
            return super().forward(x)
        y, largest = Product.apply(*self.cast(x), self.quantised_weight(MULTIPLE), self.scale, self.weight_scale)
        self.record(largest)
        return y.unflatten(0, x.shape[:-1])

    def cast(self, x):
        """x as rows, W and b (or None), in the dtype in which autocast multiplies."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        return x.to(dtype).flatten(0, -2), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def quantised_weight(self, multiple):
        """W with rows of zeros added, up to a multiple."""
        return quantise(F.pad(self.weight, (0, 0, 0, -self.out_features % multiple)), self.weight_scale)

    def operands(self, x, multiple):
        """x [M, K] and quantised_weight(), quantised, and their scales: the first four arguments of multiply()."""
        self.record(find_largest(x))
        return quantise(x, self.scale), self.quantised_weight(multiple), self.scale, self.weight_scale

    @torch.no_grad()
    def record(self, largest):
        """In place, for CUDA graphs. Nothing changes if a checkpointed block computes its activations again."""
        self.largest.copy_(torch.maximum(self.largest, largest))


def convert(model):
    """Let the layers of a GPT for which it pays multiply in FP8: the head, the MLPs, and q, k and v."""
    model.head = Float8Linear(model.head)
    for block in model.blocks:
        block.attention.qkv = Float8Linear(block.attention.qkv)
        for name, layer in block.mlp.named_children():
            if isinstance(layer, nn.Linear):
                setattr(block.mlp, name, Float8Linear(layer))


class Scales:
    """Sets the scales of a network's Float8Linear layers. It happens on the device; the host never waits.

    Attributes:
        history: [layers, HISTORY] float32, the largest absolute inputs of the last steps, newest first; 0 is none.
    """

    def __init__(self, network):
        self.layers = [layer for layer in network.modules() if isinstance(layer, Float8Linear)]
        self.history = self.layers[0].scale.new_zeros(len(self.layers), HISTORY)

    @torch.no_grad()
    def begin(self):
        """Before the forward passes of a step."""
        largest = torch._foreach_norm([layer.weight for layer in self.layers], math.inf)
        self._set("weight_scale", find_scale(torch.stack(largest)))
        torch._foreach_zero_([layer.largest for layer in self.layers])

    @torch.no_grad()
    def end(self, world):
        """After them, on all of the `world` ranks."""
        largest = torch.stack([layer.largest for layer in self.layers])
        largest = torch.where(largest.isfinite(), largest, 0.0)  # the step is skipped, and its values must not stay
        if world > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        self.load(torch.cat((largest[:, None], self.history[:, :-1]), 1))

    def load(self, history):
        self.history.copy_(history)
        self._set("scale", find_scale(self.history.amax(1)))

    def _set(self, name, values):
        torch._foreach_copy_([getattr(layer, name) for layer in self.layers], values.unbind())
