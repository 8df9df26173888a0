"""score_mod, a user's rule: f(score, q_pos, k_pos, head, sequence, *score_args) -> (new score, derivative).

An op takes no function. It takes a key, which names the function and its source, and finds the function here. This
module needs no Triton.
"""

import torch

from .gpu import runs_kernels

MOST = 256  # functions that are remembered besides those in graphs of torch.compile
FUNCTIONS = {}  # key -> the Triton function, the newest last
TWINS = {}  # key -> its attribute `eager`: the same new score in PyTorch, for the reference
_TRACED = set()  # keys in graphs
_SEEN = []  # the key of the function that Dynamo traces


def key_of_function(score_mod):
    """The key of a Triton function, by which ops and kernels find it; compiled kernels depend on it."""
    if not torch.compiler.is_compiling():
        return remember(score_mod)
    from torch._dynamo.comptime import comptime

    comptime(_remember_traced)
    return _seen_key()


def remember(score_mod):
    """Put a Triton function into the table and return its key."""
    function = getattr(score_mod, "fn", None)
    if not callable(function) or isinstance(score_mod, torch.nn.Module):
        raise ValueError(f"score_mod={score_mod!r} is no Triton function; decorate it with @triton.jit")
    source = getattr(score_mod, "cache_key", None) or id(score_mod)  # the interpreter has no cache_key
    key = f"{function.__module__}.{function.__qualname__} {source}"
    FUNCTIONS.pop(key, None)
    FUNCTIONS[key] = score_mod
    TWINS[key] = getattr(score_mod, "eager", None)
    while len(FUNCTIONS) > MOST + len(_TRACED):
        oldest = next(x for x in FUNCTIONS if x not in _TRACED)
        del FUNCTIONS[oldest], TWINS[oldest]
    return key


def _remember_traced(context):
    """Called while Dynamo traces key_of_function(). Dynamo itself does nothing with a Triton function but launch it."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    traced = context.get_local("score_mod")._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
    install_guard(traced.source.make_guard(GuardBuilder.ID_MATCH))  # another function is traced anew
    found = next((getattr(traced, name) for name in ("kernel", "value") if hasattr(traced, name)), traced)
    _SEEN[:] = [remember(found)]
    _TRACED.update(_SEEN)


def _seen_key():
    return _SEEN[0]


_seen_key._dynamo_marked_constant = True


def name_of(key):
    return key.split()[0]


def function_of(key):
    """The Triton function of a key."""
    if key not in FUNCTIONS:
        raise ValueError(f"score_mod {name_of(key)} is unknown to this process; call attention() with it once")
    return FUNCTIONS[key]


def twin_of(key):
    """The function of a key in PyTorch: (score, q_pos, k_pos, head, sequence, *score_args) -> new score."""
    twin = TWINS[key]
    if twin is None:
        raise ValueError(
            f"score_mod {name_of(key)} has no attribute `eager`, by which the reference computes it; "
            "set it to a PyTorch function of the same arguments that returns the new score"
        )
    return twin


def check_score_args(call, name, key):
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


def check_score_mod(score_mod, *score_args, heads, length=64, sequences=2):
    """Compare the derivative that a score_mod returns with differences of its own new score; and with f.eager, if set.

    Scores are random, up to about 12; positions run from 0 to length - 1. heads, sequences: how many the rule is asked
    for; it must not read past its tensors. Runs where score_args are, else on a GPU; on a CPU in Triton's interpreter,
    if TRITON_INTERPRET=1 was set at the start.

    Raises:
        ValueError: names the worst score, what was returned and what was expected; or the rule does not run.
    """
    from .ops import refuse_unseen
    from .score import evaluate_score_mod  # imports Triton

    refuse_unseen("check_score_mod", *(x for x in score_args if isinstance(x, torch.Tensor)))
    name = name_of(remember(score_mod))
    default = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = next((x.device for x in score_args if isinstance(x, torch.Tensor)), default)
    if not runs_kernels(device):
        raise ValueError(f"{name} does not run on {device}; use a CUDA GPU, or start with TRITON_INTERPRET=1")
    for i, x in enumerate(score_args):
        if isinstance(x, torch.Tensor):
            check_score_tensor(f"score_args[{i}]", x, device)
    generator = torch.Generator().manual_seed(0)
    scores = (4 * torch.randn(sequences, heads, length, length, generator=generator, device="cpu")).to(device)
    step = 2**-7 * scores.abs().clamp(min=1)
    low, high = scores - step, scores + step
    (new, slope), (below, _), (above, _) = (evaluate_score_mod(score_mod, x, score_args) for x in (scores, low, high))
    # between the slopes to both sides, which differ at a kink; apart from rounding
    sides = torch.stack(((new - below) / (scores - low), (above - new) / (high - scores)))
    error = torch.maximum(sides.amin(0) - slope, slope - sides.amax(0))
    allowed = 1e-2 * slope.abs().clamp(min=1) + 1e-6 * new.abs() / step
    hidden = (torch.stack((new, below, above)) == -torch.inf).any(0)
    _raise_at_worst(
        f"{name} returns the derivative", "its new scores", scores, slope, sides.mean(0), error / allowed, hidden
    )
    twin = getattr(score_mod, "eager", None)
    if twin is not None:
        places = [torch.arange(n, device=device) for n in (length, length, heads, sequences)]
        shapes = (1, 1, -1, 1), (1, 1, 1, -1), (1, -1, 1, 1), (-1, 1, 1, 1)
        expected = twin(scores, *(x.view(shape) for x, shape in zip(places, shapes, strict=True)), *score_args)
        expected = expected.expand_as(scores)
        error = (new - expected).abs() / (1e-3 * expected.abs().clamp(min=1))
        _raise_at_worst(
            f"{name} returns the score", "its attribute `eager`", scores, new, expected, error, new == expected
        )


def _raise_at_worst(what, source, scores, found, expected, error, ignored):
    """error: as a multiple of what is allowed."""
    error = error.nan_to_num(torch.inf).masked_fill(ignored, 0.0).flatten()
    worst = int(error.argmax())
    if error[worst] <= 1:
        return
    x, y, z = (float(tensor.flatten()[worst]) for tensor in (scores, found, expected))
    place = torch.unravel_index(torch.tensor(worst, device="cpu"), scores.shape)
    sequence, head, q_pos, k_pos = map(int, place)
    raise ValueError(
        f"score_mod {what} {y:.6g} at score {x:.6g}, q_pos {q_pos}, k_pos {k_pos}, head {head}, sequence {sequence}, "
        f"where {source} give {z:.6g}: mend the one that is wrong"
    )
