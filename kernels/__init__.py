"""The model's kernels beside attention: in each module the formula and the Triton kernel."""
