"""How the kernels of generation start."""

import torch

from attention.gpu import can_overlap
from attention.ops import refuse_unseen


def launch(kernel, grid, *args, **options):
    """Start a kernel whose first argument is a tensor on a GPU, if the chip can before the last kernel has ended.

    Its parameter OVERLAP is whether it does: it then calls wait_for_inputs(OVERLAP) before it reads memory.
    """
    refuse_unseen(kernel.__name__, *(x for x in args if isinstance(x, torch.Tensor)))
    overlap = can_overlap(args[0].device)
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, OVERLAP=overlap, launch_pdl=overlap, enable_fp_fusion=True, **options)
