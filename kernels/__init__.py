"""The model's kernels beside attention: in each module the formula, the Triton kernel and the torch.library op."""
