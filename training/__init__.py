"""What train.py calls: options, ranks, optimizer, the step, checkpoints, reports."""
