"""Train a GPT.

    python train.py configs/shakespeare.py [--learning_rate 3e-4 ...]     one process, on a GPU or a CPU
    python train.py --resume                                              resume the newest run
    torchrun --nproc_per_node=4 train.py configs/gpt2.py                  several GPUs of a host

A run writes runs/NAME/: config.json, kestrel.json (the tokenizer), metrics.jsonl, checkpoints, best.pt and loss.png.
Ctrl-C, SIGTERM and a closed terminal save and stop; SIGUSR1 saves and goes on. If a report fails, training goes on.
"""

from errors import UNFINISHED, catch_ctrl_c, command

if __name__ == "__main__":
    catch_ctrl_c()

import sys
from contextlib import closing
from functools import partial

import torch
import torch.distributed as dist
from tqdm import tqdm

from data.loader import Batches, validation_batches
from device import autocast, eagerly, set_precision
from generation import Generator
from training.batches import choose_micro_batch, training_batches
from training.checkpoint import Run
from training.config import load_config
from training.network import as_graph, compile_and_wrap, load_pretrained, make_model
from training.optimizer import Optimizer, learning_rate, note_new_rate
from training.ranks import STOP, Signals, end_distributed, fail, lost_rank, open_on_all_ranks, start_distributed
from training.report import Report
from weights import checkpoints, load_first

SAMPLE_PROMPT, SAMPLE_TOKENS = 16, 100  # of --sample_every


def take_step(network, optimizer, micro_batches):
    """One update; returns the loss in nats per token and the norm of its gradient, [] on the device."""
    loss = 0
    # The weights add up to 1 over all ranks. The iterator also seeds dropout, and tells DDP when to add up gradients.
    for inputs, targets, weight in micro_batches:
        part = network(inputs, targets) * weight
        optimizer.backward(part)
        loss = loss + part.detach()
    grad_norm = optimizer.step(loss)  # makes loss that of all ranks
    optimizer.zero_grad()
    return loss, grad_norm


@torch.no_grad()
def evaluate(model, batches, config, ranks):
    """Mean loss in nats per token of a GPT on validation_batches(), which are split over the ranks."""
    losses = []
    model.eval()
    silent = None if ranks.rank == 0 else True  # None shows a bar on a terminal only
    for first in tqdm(range(0, len(batches), ranks.world), "evaluation", delay=1, leave=False, disable=silent):
        index = min(first + ranks.rank, len(batches) - 1)  # a rank without a batch takes part: FSDP needs all ranks
        inputs, targets = batches[index]()
        count = int((targets >= 0).sum()) * (index == first + ranks.rank)
        inputs, targets = inputs.to(ranks.device), targets.to(ranks.device)
        # compiling the evaluation takes longer than it saves
        with eagerly(), autocast(config.dtype, ranks.device):
            losses.append((model(inputs, targets), count))
    model.train()
    if ranks.sharded:
        model.reshard()  # the next step must not find gathered weights: those of an average may have been evaluated
    total = sum(loss.item() * count for loss, count in losses)  # at the end, so that the host does not wait for each
    tokens = sum(count for _, count in losses)
    if ranks.world > 1:
        sums = torch.tensor([total, tokens], dtype=torch.float64, device=ranks.device)
        dist.all_reduce(sums)
        total, tokens = sums.tolist()
    return total / tokens


def train(config, argv=()):
    """One run; returns the best validation loss in nats per token. argv: the command line that config is from."""
    ranks = start_distributed(config)
    config = ranks.broadcast(config)  # with --resume alone, ranks may have found different runs
    set_precision(config.deterministic, ranks.on_gpu)
    saved = load_first(checkpoints(config.resume)) if config.resume else {}
    corpus = open_on_all_ranks(config, ranks, saved, argv)
    if config.depth and not config.resume:  # batch, rates and steps depend on the corpus
        config = load_config(argv, corpus)
    batches = Batches(corpus.train, config.block_size, config.batch_size, config.seed)
    config = config.with_steps(batches.windows_per_epoch)
    if saved and ranks.rank == 0:
        note_new_rate(saved, config)

    model = make_model(config, corpus.tokenizer, ranks)
    if config.init_from and not saved:
        load_pretrained(model, config.init_from, corpus.tokenizer)
    optimizer = Optimizer(model, config, ranks)
    micro_batch = choose_micro_batch(model, config, ranks, saved.get("micro_batch"))
    # evaluate the same tokens for any micro-batch
    count = config.eval_batches * (config.batch_size // micro_batch)
    validation = validation_batches(corpus.val, config.block_size, micro_batch, count or None)

    run = Run(config, corpus, ranks, saved)
    start, best = run.load(saved, model, optimizer)  # 0 and infinity for a new run
    del saved  # a mapped file that is deleted takes up disk space until then
    loss, val_loss = None, best
    network = compile_and_wrap(model, config, ranks)
    run_step = as_graph(take_step, network, optimizer, config, ranks, micro_batch)
    report = Report(run.folder, config, model, corpus, ranks, start)
    report.describe(model, corpus, batches, ranks, micro_batch)

    steps = range(start, config.steps)
    step_batches = training_batches(batches, steps, network, optimizer, config, ranks, micro_batch)
    with Signals(ranks) as signals, closing(step_batches):
        for step in range(start, config.steps + 1):
            asked, last = signals.agreed(), step == config.steps
            if step != run.last_step and (last or step % config.eval_every == 0):
                optimizer.check_bad_steps(step, batches, run.folder)
                with report.pause(), optimizer.averaged():
                    val_loss = evaluate(model, validation, config, ranks)
                    is_best = 0 < step and val_loss < best
                    if is_best:
                        best = val_loss
                        run.save_best(step, best, model)
                    report.evaluation(step, val_loss, is_best)
            if last or asked or step % (config.save_every or config.eval_every) == 0:
                optimizer.check_bad_steps(step, batches, run.folder)
                with report.pause():
                    run.save(step, best, loss, val_loss, model, optimizer, micro_batch)
            if asked == STOP or last:
                break  # after config.steps updates and one last evaluation

            rate = learning_rate(step, config)
            optimizer.set_rate(rate)
            loss, grad_norm = run_step(next(step_batches))
            optimizer.move_average(step)
            if step == start:
                loss.item()  # waits for the device
                UNFINISHED.clear()  # from here on an error leaves the run's folder
                run.write_options()
                report.start()
            if (step + 1) % config.log_every == 0:
                report.step(step + 1, rate, loss, grad_norm, optimizer.skipped)
                optimizer.check_bad_steps(step + 1, batches, run.folder)
            if config.sample_every and (step + 1) % config.sample_every == 0 and step + 1 < config.steps:
                with optimizer.averaged():
                    report.sample(step + 1, partial(write_sample, model, corpus, config))
    try:
        run.close()
    finally:
        with optimizer.averaged():
            report.close(step, None if ranks.sharded else partial(write_sample, model, corpus, config))
    return best


def write_sample(model, corpus, config):
    """The start of the validation text, continued by the current model; torch's random state does not change."""
    prompt = corpus.val.windows([0], min(SAMPLE_PROMPT, config.block_size))[0].tolist()
    model.eval()
    try:
        generator = Generator(model, corpus.tokenizer, seed=config.seed, graph=False)
        with eagerly():  # the model is compiled for the shapes of training only
            tokens = [token for [token] in generator.tokens([prompt], SAMPLE_TOKENS)]
    finally:
        model.train()
    return corpus.tokenizer.decode(prompt + tokens)


def main(argv):
    try:
        with command("give a smaller --micro_batch, or --checkpoint_activations blocks", fail), lost_rank():
            train(load_config(argv), argv)
    finally:
        end_distributed()


if __name__ == "__main__":
    main(sys.argv[1:])
