"""What only training needs: options, ranks, network, optimizer, checkpoints, reports."""
