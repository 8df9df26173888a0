"""check_score_mod(): whether the derivative that a user's score_mod returns is that of its score."""

import torch

from .gpu import runs_kernels
from .ops import refuse_unseen
from .score_mod import check_score_tensor, name_of, remember


def check_score_mod(score_mod, *score_args, heads, length=64, sequences=2):
    """Compare the derivative that a score_mod returns with differences of its own new score; and with f.eager, if set.

    Scores are random, up to about 12; positions run from 0 to length - 1. heads, sequences: how many the rule is asked
    for; it must not read past its tensors. Runs where score_args are, else on a GPU; on a CPU in Triton's interpreter,
    if TRITON_INTERPRET=1 was set at the start.

    Raises:
        ValueError: names the worst score, what was returned and what was expected; or the rule does not run.
    """
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


def _raise_at_worst(what, source, scores, returned, expected, error, ignored):
    """error: as a multiple of what is allowed."""
    error = error.nan_to_num(torch.inf).masked_fill(ignored, 0.0).flatten()
    worst = int(error.argmax())
    if error[worst] <= 1:
        return
    x, y, z = (float(tensor.flatten()[worst]) for tensor in (scores, returned, expected))
    place = torch.unravel_index(torch.tensor(worst, device="cpu"), scores.shape)
    sequence, head, q_pos, k_pos = map(int, place)
    raise ValueError(
        f"score_mod {what} {y:.6g} at score {x:.6g}, q_pos {q_pos}, k_pos {k_pos}, head {head}, sequence {sequence}, "
        f"where {source} give {z:.6g}: mend the one that is wrong"
    )
