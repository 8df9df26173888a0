"""Train a GPT, top to bottom.

    python train.py configs/shakespeare.py [--learning_rate 3e-4 ...]     one process, GPU or CPU
    python train.py --resume                                              go on with the newest run
    torchrun --nproc_per_node=4 train.py configs/gpt2.py                  several GPUs of a host

Everything a run writes is in runs/NAME/: config.json, metrics.jsonl, checkpoint.pt, best.pt and loss.png. Ctrl-C,
SIGTERM or a lost terminal saves and stops, SIGUSR1 saves and goes on. docs/reliability.md says what happens when
something breaks.
"""

import math
import os
import sys
import time
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ahead import fetch_ahead
from checkpoint import Saver, new_run, read_config
from config import fail, load_config, resolve_dtype
from data import Batches, TokenFileError, fingerprint, to_state, validation_batches
from distributed import STOP, Signals, check_agreement, ignore_saves, is_lost, open_on_all_ranks, start_distributed
from fit import choose_micro_batch, largest_micro_batch, share_of_rank
from graphs import Recorded
from guard import StepGuard
from model import GPT
from optimizer import learning_rate, make_optimizer, set_learning_rate
from report import Laps, Report, age, describe, peak_flops
from resume import known_tokens, restore
from say import last_word, say

IMPORTED = age()  # after so many seconds


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # to compile once more takes longer than most evaluations
def evaluate(model, batches, autocast, distributed):
    """Mean validation loss in nats per token; the batches are dealt out to the ranks."""
    parts = []
    model.eval()
    for index in range(distributed.rank, len(batches), distributed.world):
        tokens, targets = batches[index]
        with autocast:
            parts.append((model(tokens.to(distributed.device), targets.to(distributed.device)), targets.numel()))
    model.train()
    total = sum(loss.item() * count for loss, count in parts)  # only now, so that the host runs ahead of the device
    tokens_seen = sum(count for _, count in parts)
    if distributed.world > 1:
        sums = torch.tensor([total, tokens_seen], dtype=torch.float64, device=distributed.device)
        dist.all_reduce(sums)
        total, tokens_seen = sums.tolist()
    return total / tokens_seen


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def largest_lse(model, batches, autocast, distributed, config):
    """[n_layer] floats: the largest log-sum-exp of each layer's attention in one validation sequence, if asked for."""
    if not (config.log_attention and distributed.is_main):
        return None
    largest = []
    with autocast:
        model.eval()(batches[0][0][:1].to(distributed.device), lse=largest)
    model.train()
    return torch.stack(largest).tolist()


def seed_dropout(*numbers):
    """Make what torch draws next a function of some numbers: of the rows, whichever rank has them, not of the past."""
    torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))


def train(config):
    """One run; returns the best validation loss in nats per token."""
    laps = Laps(imports=IMPORTED)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
    distributed = start_distributed(config)
    rank, world, device, _ = distributed
    is_main = distributed.is_main
    kind = torch.device(device).type

    check_agreement(config, distributed)
    share = share_of_rank(config, world)
    dtype = resolve_dtype(config.dtype, device)
    if kind == "cuda":
        torch.set_float32_matmul_precision("high")
    folder = Path(config.resume) if config.resume else None
    corpus = open_on_all_ranks(config, distributed, known_tokens(folder) if folder and is_main else None)
    tokens_sha256 = corpus.digest()
    batches = Batches(corpus.train, config.block_size, config.batch_size, config.seed)
    bits_per_nat = 1 / math.log(2) / corpus.bytes_per_token
    laps.end("data")

    # Model: from its seed, or from the checkpoint of the run to go on with.
    torch.manual_seed(config.seed)
    model = raw_model = GPT(config.model(corpus.tokenizer.n_vocab)).to(device)
    optimizer = make_optimizer(model, config, distributed)
    guard = StepGuard(config.skip_zscore, float(config.max_bad_steps)).to(device)
    scaler = torch.amp.GradScaler(kind, enabled=dtype == torch.float16)
    autocast = torch.autocast(kind, dtype) if dtype != torch.float32 else nullcontext()
    with torch.no_grad(), autocast:  # what cannot run on this device fails here, before the run's folder exists
        model.eval()(*(x.to(device) for x in batches.batch(0, slice(1))))
    model.train()
    parts = {"optimizer": optimizer, "scaler": scaler, "guard": guard}
    saver = Saver(folder, config.keep) if is_main and folder else None
    path, record = distributed.share((saver.newest(), read_config(folder)) if saver else (None, None))
    start, best, before = 0, math.inf, None
    if path:  # none: a new run, or one that ended before its first checkpoint and begins again
        start, best, before, threads = restore(path, record, config, corpus, model, parts)
        if not guard.row < config.max_bad_steps:
            guard.row.zero_()  # what ended a run does not end it again
        if kind == "cpu" and world == 1 and threads:
            torch.set_num_threads(threads)

    def search():
        return distributed.smallest(largest_micro_batch(model, share, autocast, world, config.shard_optimizer))

    micro_batch = choose_micro_batch(config, share, before, search)
    eval_batches = config.eval_batches * (config.batch_size // micro_batch) or None  # as many tokens on any machine
    validation = validation_batches(corpus.val, config.block_size, micro_batch, eval_batches)
    if is_main:
        if saver:
            saver.go_on(config, tokens_sha256, start if path else None)
        else:
            folder = new_run(config, tokens_sha256)
            saver = Saver(folder, config.keep)

    if kind == "cuda":
        if config.compile == "blocks":
            for block in model.blocks:
                block.compile()
        elif config.compile == "model":
            model = torch.compile(model)
    if world > 1:
        model = DistributedDataParallel(model, device_ids=[device] if kind == "cuda" else None, broadcast_buffers=False)

    report = Report(
        folder,
        config,
        bits_per_nat=bits_per_nat,
        flops_per_step=raw_model.flops_per_token() * config.batch_size * config.block_size,
        peak=peak_flops(device) * world if peak_flops(device) else None,
        start=start,
        enabled=is_main,
    )
    go_on = f"{'python' if world == 1 else 'torchrun ...'} train.py --resume {folder}"
    if is_main:
        describe(config, raw_model, corpus, distributed, dtype, folder, micro_batch)
    laps.end("model")

    def evaluate_and_record(step):
        """The best validation loss so far, and whether it is this step's."""
        # not DDP's model: a rank may have no batch, which it would wait for
        val_loss = evaluate(raw_model, validation, autocast, distributed)
        corpus.check_unchanged(tokens_sha256)
        is_best = 0 < step and val_loss < best
        report.evaluation(step, val_loss, is_best, largest_lse(raw_model, validation, autocast, distributed, config))
        return val_loss if is_best else best, is_best

    def save(step, is_best):
        weights = {
            "config": asdict(config),
            "model_config": asdict(raw_model.config),
            "model": raw_model.state_dict(),
            "tokenizer": to_state(corpus.tokenizer),
            "tokenizer_hash": fingerprint(corpus.tokenizer),
            "tokens_sha256": tokens_sha256,
            "micro_batch": micro_batch,
            "step": step,
            "best": best,
            "threads": torch.get_num_threads() if kind == "cpu" and world == 1 else None,
        }
        states = {name: part.state_dict() for name, part in parts.items()}  # of all ranks, if the optimizer is sharded
        if is_main:
            report.flush()
            saver.save(weights, states, is_best)

    @contextmanager
    def rescue():
        """When a token file turns out changed, save the steps taken before it was, then let the error end the run."""
        try:
            yield
        except TokenFileError:
            due = step % config.eval_every == 0 or step == config.steps  # a resumed run would not evaluate it
            whole = world == 1 or not config.shard_optimizer  # else each rank holds a part of the state
            if is_main and not due and whole and guard.row < config.max_bad_steps:
                saver.wait()
                if step > (saver.step or 0):
                    save(step, False)
                    saver.wait()
                if saver.step == step:
                    say(f"stopped at step {step}; once the tokens are back, go on with: {go_on}", sys.stderr)
            raise

    def check_row(step, row):
        """End the run if the last `row` steps before `step`, too many, were not taken."""
        if row < config.max_bad_steps:
            return
        try:
            if is_main:
                bad = step - int(row)  # the first of the row
                fail(
                    f"no step from {bad + 1} to {step} was taken, because the loss or gradient norm of "
                    f"{config.max_bad_steps} in a row was not finite; the first had {batches.describe(bad)}; the last "
                    f"good checkpoint is {saver.last_good()}; look at that batch, or go on with a lower rate: "
                    f"--resume {folder} --learning_rate {config.learning_rate / 2:g} --allow_changes True"
                )
        finally:
            distributed.share(None)  # else torchrun might end the first rank before it has said so
        sys.exit(1)

    def fetch(step, first):
        """Tokens and targets of the micro-batch that begins with a row of a step's batch, on the host."""
        micro = batches.batch(step, slice(first, first + micro_batch))
        corpus.check_unchanged(tokens_sha256)
        if kind == "cuda":
            with torch.cuda.device(device):
                micro = [x.pin_memory() for x in micro]
        return step, first, micro

    def load():
        """Tokens and targets of the next micro-batch, on the device."""
        step, first, micro = next(fetched)
        if config.dropout > 0:
            seed_dropout(config.seed, step, first)
        return [x.to(device, non_blocking=True) for x in micro]  # pinned: the copy overlaps with the step before

    def gradients(tokens, targets):
        """Add those of a micro-batch to the parameters'; returns its part of the loss, the mean of the global batch."""
        with autocast:
            loss = model(tokens, targets) * (micro_batch / share)
        scaler.scale(loss).backward()
        return loss.detach() / world

    def update(loss):
        """Take the step, unless the guard objects; returns the loss of all ranks and the norm of the gradient."""
        if world > 1:
            dist.all_reduce(loss)
        scaler.unscale_(optimizer)
        grad_norm = clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        optimizer.found_inf = guard(loss, grad_norm)  # where it is 1, the optimizer leaves everything as it is
        optimizer.step()
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss, grad_norm

    def whole_step(tokens, targets):
        return update(gradients(tokens, targets))

    if config.cuda_graph and kind == "cuda" and world == 1 and not scaler.is_enabled():
        whole_step = Recorded(whole_step)

    firsts = range(rank * share, (rank + 1) * share, micro_batch)
    fetched = fetch_ahead(fetch, ((step, first) for step in range(start, config.steps) for first in firsts))
    with Signals(distributed) as signals, closing(fetched), rescue():
        for step in range(start, config.steps + 1):
            asked = signals.agreed()
            due = step % config.eval_every == 0 or step == config.steps
            if due or asked:
                if kind == "cuda":
                    torch.cuda.synchronize()  # the steps still queued are not the evaluation's
                since = time.perf_counter()
                is_best = False
                if step > start:
                    check_row(step, guard.row.item())
                if due and (step > start or step == 0):
                    best, is_best = evaluate_and_record(step)
                if step > start:
                    save(step, is_best)
                report.pause(since)
                if step == start:
                    laps.end("evaluation")
            if asked == STOP or step == config.steps:
                break  # config.steps updates, then one last evaluation

            rate = learning_rate(step, config)
            set_learning_rate(optimizer, rate)
            if len(firsts) > 1:
                with nullcontext() if world == 1 else model.no_sync():
                    loss = sum(gradients(*load()) for _ in firsts[1:])
                loss, grad_norm = update(loss + gradients(*load()))
            else:
                loss, grad_norm = whole_step(*load())
            if step == start:
                if kind == "cuda":
                    torch.cuda.synchronize()
                laps.end("first step")
                report.start(laps.seconds)

            if (step + 1) % config.log_every == 0:
                # .tolist() waits for the device: the only time the host does so in a plain step
                numbers = torch.stack((loss, grad_norm, guard.skipped, guard.row)).tolist()
                report.step(step + 1, rate, *numbers[:3])
                check_row(step + 1, numbers[3])

        if is_main:
            saver.close()

    if step < config.steps:
        report.close(f"stopped at step {step}; go on with: {go_on}")
    else:
        report.close(
            f"best val loss {best:.4f} nats/token = {best * bits_per_nat:.4f} bits/byte; run in {folder}",
            "sample from it: python sample.py",
        )
    return best


def main(argv):
    ignore_saves()
    try:
        train(load_config(argv))
    except (ValueError, OSError) as error:
        fail(error)
    except torch.OutOfMemoryError as error:
        fail(f"{str(error).split('. ')[0]}; take --micro_batch auto, or a smaller network")
    except RuntimeError as error:
        if not is_lost(error):
            raise
        fail(f"it lost the other ranks ({str(error).splitlines()[0]}); the one that ended first says why")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        last_word()


if __name__ == "__main__":
    main(sys.argv[1:])
