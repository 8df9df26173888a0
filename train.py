"""Train a GPT.

    python train.py configs/shakespeare.py [--learning_rate 3e-4 ...]     one process, on a GPU or a CPU
    python train.py --resume                                              resume the newest run that is not finished
    torchrun --nproc_per_node=4 train.py configs/gpt2.py                  several GPUs of a host

A run writes runs/NAME/: config.json, kestrel.json (the tokenizer), metrics.jsonl, checkpoints, best.pt and loss.png.
Ctrl-C, SIGTERM and a closed terminal save and stop; SIGUSR1 saves and goes on. If a report fails, training goes on.
"""

from errors import start_command

if __name__ == "__main__":
    start_command("PyTorch")  # before the imports, which take seconds

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm

from data.loader import Batches, validation_batches
from device import autocast, set_precision
from threads import cpu_threads
from training.checkpoint import Run
from training.config import load_config
from training.network import as_graph, choose_micro_batch, compile_and_wrap, load_pretrained, make_model
from training.optimizer import Optimizer
from training.ranks import STOP, Signals, rank_command, start_ranks
from training.report import Report


def take_step(network, optimizer, micro_batches, amp, ranks):
    """One update; returns the loss in nats per token and the norm of its gradient, as scalar tensors on the device.

    network: the model, perhaps compiled and in DDP. micro_batches: of this rank, as training_batches() yields them.
    amp: torch.autocast.
    """
    optimizer.begin()  # sets FP8's scales of the weights
    loss = 0
    for inputs, targets, weight, seed, is_last in micro_batches:
        if seed is not None:  # of dropout; as_graph() seeds before each replay instead
            torch.manual_seed(seed)
        with ranks.add_up_gradients(network, is_last):
            with amp:
                part = network(inputs, targets) * weight
            # DDP and FSDP take the mean of the ranks' gradients, in the backward pass; float16 needs a loss scale
            optimizer.scale(part * ranks.world).backward()
        loss = loss + part.detach()
    ranks.add_up(loss)
    grad_norm = optimizer.step(loss)  # clips, and leaves all as it is if loss or norm is not finite
    optimizer.zero_grad()
    return loss, grad_norm


def learning_rate(step, config):
    """Learning rate of a step: linear warm-up, then cosine decay, or constant with a linear cooldown at the end."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.cooldown > 0:
        fraction = min((1 - step / config.steps) / config.cooldown, 1.0)
    else:
        progress = min((step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1), 1.0)
        fraction = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_learning_rate + fraction * (config.learning_rate - config.min_learning_rate)


def training_batches(batches, steps, config, ranks, micro_batch):
    """Yield for each step the list of this rank's micro-batches: (inputs, targets, weight, seed, is_last).

    A thread loads the next batch while a step runs. batches: data.loader.Batches. steps: their numbers, a range.
    micro_batch: sequences of one, a divisor of this rank's.

    inputs, targets: [micro_batch, block_size] int64 on the device; a target of -100 does not count.
    weight: [], the micro-batch's share of the targets of the step that count: those of all ranks add up to 1.
    seed: int, of dropout, or None without it. It depends on the run's seed, the step and the rows, so that a resumed
    run draws the same masks, as does another number of ranks with the same micro_batch.
    """
    count = config.batch_size // ranks.world  # sequences of this rank
    firsts = range(ranks.rank * count, (ranks.rank + 1) * count, micro_batch)  # at which a micro-batch begins
    pinned = ranks.on_gpu  # then copies to the device do not wait for a step

    def load(step):
        inputs, targets = batches.batch(step, slice(firsts.start, firsts.stop))
        weights = (targets >= 0).view(len(firsts), -1).sum(1) / max(1, batches.counted(step))
        return [x.pin_memory() if pinned else x for x in (inputs, targets, weights)]

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(load, steps.start)
        for step in steps:
            inputs, targets, weights = (x.to(ranks.device, non_blocking=pinned) for x in ahead.result())
            if step + 1 < steps.stop:
                ahead = pool.submit(load, step + 1)
            seeds = [None] * len(firsts)
            if config.dropout > 0:
                sequences = [np.random.SeedSequence([config.seed, step, first]) for first in firsts]
                seeds = [int(sequence.generate_state(1, np.uint64)[0]) for sequence in sequences]
            is_last = [first == firsts[-1] for first in firsts]
            yield list(zip(inputs.split(micro_batch), targets.split(micro_batch), weights, seeds, is_last, strict=True))


@torch.no_grad()
def evaluate(model, batches, amp, ranks):
    """Mean loss in nats per token of a GPT on validation_batches(), which are split over the ranks."""
    losses = []
    model.eval()
    silent = None if ranks.rank == 0 else True  # None shows a bar on a terminal only
    for first in tqdm(range(0, len(batches), ranks.world), "evaluation", delay=1, leave=False, disable=silent):
        index = min(first + ranks.rank, len(batches) - 1)  # a rank without a batch takes part: FSDP needs all ranks
        inputs, targets = batches[index]()
        count = int((targets >= 0).sum()) * (index == first + ranks.rank)
        with torch.compiler.set_stance("force_eager"), amp:  # compiling takes longer than it saves
            losses.append((model(inputs.to(ranks.device), targets.to(ranks.device)), count))
    model.train()
    if ranks.sharded:
        model.reshard()  # the next step must not find gathered weights: those of an average may have been evaluated
    total = sum(loss.item() * count for loss, count in losses)  # at the end, so that the host does not wait for each
    tokens = sum(count for _, count in losses)
    if ranks.world > 1:
        sums = torch.tensor([total, tokens], dtype=torch.float64, device=ranks.device)
        ranks.add_up(sums)
        total, tokens = sums.tolist()
    return total / tokens


def train(config, corpus, run, ranks):
    """Train as a Config says; returns the best validation loss in nats per token."""
    set_precision(config.deterministic, ranks.on_gpu)
    batches = Batches(corpus.train, config.block_size, config.batch_size, config.seed)
    model = make_model(config, corpus.tokenizer, ranks)
    if config.init_from and not run.saved:
        load_pretrained(model, config.init_from, corpus.tokenizer)
    optimizer = Optimizer(model, config, ranks)
    micro_batch = choose_micro_batch(model, config, ranks, run.saved.get("micro_batch"))
    count = config.eval_batches * (config.batch_size // micro_batch)  # micro-batches; the tokens are always the same
    validation = validation_batches(corpus.val, config.block_size, micro_batch, count or None)

    if run.saved and ranks.rank == 0:
        options, step = SimpleNamespace(**run.saved["config"]), run.saved["step"]
        old, new = (f"{learning_rate(step, each):.2g}" for each in (options, config))
        if old != new:  # as with more --steps
            print(f"note: the learning rate of step {step} changes from {old} to {new}", file=sys.stderr)
    start, best = run.begin(config, corpus, model, optimizer)  # 0 and infinity for a new run
    rate = loss = grad_norm = val_loss = None
    network, amp = compile_and_wrap(model, config, ranks), autocast(config.dtype, ranks.device)
    run_step = as_graph(take_step, network, optimizer, amp, config, ranks, micro_batch)
    report = Report(run.folder, config, model, corpus, ranks, start)
    report.describe(model, batches, ranks, micro_batch)
    step_batches = training_batches(batches, range(start, config.steps), config, ranks, micro_batch)
    with Signals(ranks) as signals, closing(step_batches):
        for step in range(start, config.steps + 1):  # `step` updates are done: report, evaluate, save, make the next
            cpu_threads.share()
            begun, last = step > start, step == config.steps
            logs = begun and step % config.log_every == 0
            if begun:
                report.step(step, rate, loss, grad_norm, optimizer.skipped, logs)
            asked = signals.agreed() if begun else 0  # a vote of all ranks; before the first step nothing can be kept
            evaluates = (begun or step == 0) and (last or step % config.eval_every == 0)
            saves = begun and (last or asked or step % (config.save_every or config.eval_every) == 0)
            if logs or evaluates or saves:
                optimizer.check_bad_steps(step, batches, run.folder)  # ends the run after too many
            if config.sample_every and step % config.sample_every == 0 and begun and not last:
                with optimizer.averaged():  # with --ema, the model has the averages of its weights meanwhile
                    report.sample(step, model)
            if evaluates:
                with report.pause(), optimizer.averaged():
                    val_loss = evaluate(model, validation, amp, ranks)
                    is_best = 0 < step and val_loss < best
                    if is_best:
                        best = val_loss
                        run.save_best(step, best, model)  # the averages; checkpoints have both
                    report.evaluation(step, val_loss, is_best)
            if saves:
                with report.pause():
                    run.save(step, best, loss, val_loss, model, optimizer, micro_batch)
            if asked == STOP or last:
                break
            rate = learning_rate(step, config)
            optimizer.set_rate(rate)
            loss, grad_norm = run_step(next(step_batches))
            optimizer.move_average(step)
            if step == start:
                loss.item()  # waits for the device, whose errors until here leave nothing of the run
                run.commit()
                report.start()
    try:
        run.close()
    finally:
        with optimizer.averaged():
            report.close(step, None if ranks.sharded else model)
    return best


def main(argv):
    """Train as a command line says. In a notebook or another program, mistakes raise UserError."""
    with rank_command(__name__ == "__main__", "give a smaller --micro_batch, or --checkpoint_activations blocks"):
        config = load_config(argv)
        ranks = start_ranks(config)
        config = ranks.broadcast(config) if config.resume else config  # ranks may have found different newest runs
        with Run(config, ranks) as run:
            corpus = run.open_corpus(argv)
            train(config.completed(corpus), corpus, run, ranks)


if __name__ == "__main__":
    main(sys.argv[1:])
