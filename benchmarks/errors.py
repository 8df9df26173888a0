"""Relative error of the output of attention by number of keys, against float64: docs/attention.md, section 12.

python benchmarks/errors.py     prints a table: benchmarks/results/errors.csv
"""

import torch
from harness import DEVICE, command_line, table

from attention import attention
from attention.reference import reference_attention


def rows():
    torch.manual_seed(0)
    for keys in (2**n for n in range(7, 16)):
        for dtype in (torch.bfloat16, torch.float16):
            shapes = (1, 256, 4, 128), (1, keys, 4, 128), (1, keys, 4, 128)  # 256 queries of 4 heads
            qkv = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
            exact = reference_attention(*(x.double() for x in qkv), causal=False)
            outs = (call(*qkv, causal=False) for call in (reference_attention, attention))
            errors = (f"{(out.double() - exact).norm() / exact.norm():.3e}" for out in outs)
            yield keys, str(dtype).removeprefix("torch."), *errors


def main():
    command_line(__doc__).parse_args()
    table(["keys", "dtype", "eager PyTorch", "attention()"], rows())


if __name__ == "__main__":
    main()
