"""score_mod, a user's rule: f(score, q_pos, k_pos, head, sequence, *score_args) -> (new score, derivative).

An op takes no function. It takes a label, which names the function and its source, and finds the function here. This
module needs no Triton.
"""

import torch

MOST = 256  # functions that are remembered besides those in graphs of torch.compile
FUNCTIONS = {}  # label -> the Triton function, the newest last
TWINS = {}  # label -> its attribute `eager`: the same new score in PyTorch, for the reference
_TRACED = set()  # labels in graphs
_SEEN = []  # the label of the function that Dynamo traces


def label_of(score_mod):
    """The label of a Triton function, by which ops and kernels find it; compiled kernels depend on it."""
    if not torch.compiler.is_compiling():
        return remember(score_mod)
    from torch._dynamo.comptime import comptime

    comptime(_remember_traced)
    return _seen_label()


def remember(score_mod):
    """Put a Triton function into the table and return its label."""
    function = getattr(score_mod, "fn", None)
    if not callable(function) or isinstance(score_mod, torch.nn.Module):
        raise ValueError(f"score_mod={score_mod!r} is no Triton function; decorate it with @triton.jit")
    source = getattr(score_mod, "cache_key", None) or id(score_mod)  # the interpreter has no cache_key
    label = f"{function.__module__}.{function.__qualname__} {source}"
    FUNCTIONS.pop(label, None)
    FUNCTIONS[label] = score_mod
    TWINS[label] = getattr(score_mod, "eager", None)
    while len(FUNCTIONS) > MOST + len(_TRACED):
        oldest = next(x for x in FUNCTIONS if x not in _TRACED)
        del FUNCTIONS[oldest], TWINS[oldest]
    return label


def _remember_traced(context):
    """Called while Dynamo traces label_of(). Dynamo itself does nothing with a Triton function but launch it."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    traced = context.get_local("score_mod")._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
    install_guard(traced.source.make_guard(GuardBuilder.ID_MATCH))  # another function is traced anew
    function = next((getattr(traced, name) for name in ("kernel", "value") if hasattr(traced, name)), traced)
    _SEEN[:] = [remember(function)]
    _TRACED.update(_SEEN)


def _seen_label():
    return _SEEN[0]


_seen_label._dynamo_marked_constant = True


def name_of(label):
    return label.split()[0]


def function_of(label):
    """The Triton function of a label."""
    if label not in FUNCTIONS:
        raise ValueError(f"score_mod {name_of(label)} is unknown to this process; call attention() with it once")
    return FUNCTIONS[label]


def twin_of(label):
    """The function of a label in PyTorch: (score, q_pos, k_pos, head, sequence, *score_args) -> new score."""
    twin = TWINS[label]
    if twin is None:
        raise ValueError(
            f"score_mod {name_of(label)} has no attribute `eager`, by which the reference computes it; "
            "set it to a PyTorch function of the same arguments that returns the new score"
        )
    return twin


def check_score_args(call, name, label):
    """score_args of a Call with a score_mod: tensors, which arrive as pointers, and numbers."""
    if not isinstance(call.score_args, tuple):
        raise ValueError(f"score_args is {type(call.score_args).__name__}; it must be a tuple of tensors and numbers")
    for i, x in enumerate(call.score_args):
        if isinstance(x, bool) or not isinstance(x, (int, float)):
            check_score_tensor(f"score_args[{i}]", x, call.q.device)


def check_score_tensor(name, x, device):
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name}={x!r} is {type(x).__name__}; it must be a tensor, an int or a float")
    if x.device != device or not x.is_contiguous():
        raise ValueError(
            f"{name} has strides {x.stride()} on {x.device}; score_mod gets a pointer, so it must be contiguous and on "
            f"{device}: call .contiguous()"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, but score_args get none: detach() it")


def split_args(score_args):
    """score_args as two fields of a Call: an op takes lists of one type."""
    tensors = [x if isinstance(x, torch.Tensor) else None for x in score_args]
    numbers = [0 if isinstance(x, torch.Tensor) else x for x in score_args]
    return dict(score_tensors=tensors, score_numbers=numbers)


def join_args(call):
    """The reverse of split_args()."""
    pairs = zip(call.score_tensors, call.score_numbers, strict=True)
    return [number if tensor is None else tensor for tensor, number in pairs]
