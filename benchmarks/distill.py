"""The mean of the probabilities of several runs: its loss, or a network that learns from it.

    python benchmarks/distill.py runs/a runs/b runs/c runs/d
    python benchmarks/distill.py runs/a runs/b runs/c runs/d -- configs/modern.py --tokens 48_000_000 --name student

The loss is that of the validation batches of the first run, in nats per token. After -- stand the options of train.py.
The runs need one tokenizer, of texts, not of conversations. Half of the student's loss compares it with the mean, the
other half with the text, as in Hinton et al. 2015, Distilling the knowledge in a neural network, without a temperature.
It trains on one GPU.
"""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from harness import DEVICE
from torch import nn

import train
from data.corpus import open_corpus
from data.loader import validation_batches
from errors import command, require
from training.config import load_config
from training.ranks import end_distributed, start_distributed
from weights import load

SHARE = 0.5  # of the loss that compares with the mean


@torch.compile
def mean_probabilities(logits):
    return sum(part.softmax(-1) for part in logits) / len(logits)


@torch.compile
def taught_loss(logits, mean, targets):
    """Nats per token of logits [N, V], by the mean's probabilities [N, V] and by targets [N]."""
    return SHARE * F.cross_entropy(logits, mean) + (1 - SHARE) * F.cross_entropy(logits, targets)


class Ensemble(nn.Module):
    def __init__(self, runs):
        super().__init__()
        self.members = [torch.compile(load(run, DEVICE, "float32")[0]) for run in runs]

    @torch.no_grad()
    def probabilities(self, tokens):
        """The mean of the members' probabilities [B * T, V] of tokens [B, T]."""
        return mean_probabilities([member(tokens).flatten(0, 1) for member in self.members])

    def forward(self, tokens, targets):
        """Loss of this mean in nats per token, as train.evaluate() asks a network for it."""
        return F.nll_loss(self.probabilities(tokens).log(), targets.flatten())


def take_taught_step(ensemble, network, optimizer, micro_batches):
    """train.take_step() with another loss."""
    loss = 0
    for inputs, targets, weight in micro_batches:
        with train.autocast(optimizer.config.dtype, inputs.device.type):
            mean = ensemble.probabilities(inputs)
        part = taught_loss(network(inputs).flatten(0, 1), mean, targets.flatten())
        optimizer.backward(part * weight)
        loss = loss + part.detach() * weight
    grad_norm = optimizer.step(loss)
    optimizer.zero_grad()
    return loss, grad_norm


def main(argv):
    runs, options = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, None)
    require(runs, "name at least one run, such as runs/a")
    ensemble = Ensemble(runs)
    try:
        if options is not None:
            train.take_step = partial(take_taught_step, ensemble)
            return train.train(load_config(options), options)
        config = load_config(["--resume", runs[0]])
        ranks, corpus = start_distributed(config), open_corpus(config.data, config.tokenizer, config.input or None)
        batches = validation_batches(corpus.val, config.block_size, config.batch_size, config.eval_batches or None)
        print(f"{len(runs)} runs: {train.evaluate(ensemble, batches, config, ranks):.4f} nats/token")
    finally:
        end_distributed()


if __name__ == "__main__":
    with command("give a smaller --micro_batch"):
        main(sys.argv[1:])
