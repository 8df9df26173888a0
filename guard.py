"""Steps that must not be taken: those whose loss or gradient norm is not finite, or far out of line."""

import math

import torch
from torch import nn

WINDOW = 128  # steps that an outlier is compared with, as in llm.c


class StepGuard(nn.Module):
    """Judges each step on the device, so that the host need not wait; its buffers are part of the checkpoint.

    Args:
        zscore: skip a step whose loss or gradient norm is so many standard deviations above the mean of the last WINDOW
            steps; 0 = skip only what is not finite.
        longest: after so many steps in a row that are not finite no other is taken either, so that whoever looks at
            `row` now and then, and ends the run, does not miss one that is over.

    Attributes:
        skipped: [] float32, steps skipped since the run began.
        row: [] float32, how many steps in a row, up to the last one, were not finite or came after too many of those.
        history: [2, WINDOW] float32, finite losses and norms; NaN where there were none yet.

    Source: the outlier detection of llm.c, which keeps outliers in the window too, so that a new level is soon normal.
    """

    def __init__(self, zscore=0.0, longest=math.inf):
        super().__init__()
        self.zscore, self.longest = zscore, longest
        self.register_buffer("skipped", torch.zeros(()))
        self.register_buffer("row", torch.zeros(()))
        self.register_buffer("history", torch.full((2, WINDOW), float("nan")))

    @torch.no_grad()
    def forward(self, loss, grad_norm):
        """1.0 if the step of this loss and gradient norm ([] each, the same on all ranks) is to be skipped, else 0.0.

        It is what a fused optimizer takes as its `found_inf`: then neither weights nor moments nor step count change.
        """
        values = torch.stack((loss, grad_norm))
        finite = values.isfinite().all()
        bad = ~finite | (self.row >= self.longest)
        skip = bad
        if self.zscore:
            # NaN, and therefore no outlier, until the window is full
            limit = self.history.mean(1) + self.zscore * self.history.std(1)
            skip = skip | (values > limit).any()
            longer = torch.cat((self.history[:, 1:], values[:, None]), dim=1)
            self.history.copy_(torch.where(finite, longer, self.history))
        self.row.add_(1).mul_(bad)
        self.skipped.add_(skip)
        return skip.float()
