"""Train a GPT, top to bottom.

    python train.py configs/shakespeare.py [--learning_rate 3e-4 ...]     one process, GPU or CPU
    python train.py --resume                                              go on with the newest run
    torchrun --nproc_per_node=4 train.py configs/gpt2.py                  several GPUs of a host

Everything a run writes is in runs/NAME/: config.json, metrics.jsonl, checkpoint.pt, best.pt and loss.png.
"""

import json
import math
import os
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from checkpoint import load_checkpoint, load_weights, new_run, save_checkpoint
from config import fail, load_config, resolve_device, resolve_dtype
from data import Batches, atomic_file, fingerprint, open_corpus, to_state, validation_batches
from model import GPT
from report import Report, peak_flops


class Distributed(NamedTuple):
    """This process among those of the run; without torchrun it is the only one."""

    rank: int
    world: int
    device: str


def learning_rate(step, config):
    """Rate of a step: linear warm-up, then cosine, or stable and linear decay (wsd), down to min_learning_rate."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    progress = min((step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1), 1.0)
    if config.schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        left = 1 - step / config.steps
        share = min(left / config.decay_fraction, 1.0) if config.decay_fraction > 0 else 1.0
    return config.min_learning_rate + share * (config.learning_rate - config.min_learning_rate)


@torch.no_grad()
def evaluate(model, batches, autocast, distributed):
    """Mean validation loss in nats per token; the batches are dealt out to the ranks."""
    total, tokens_seen = 0.0, 0
    model.eval()
    for index in range(distributed.rank, len(batches), distributed.world):
        tokens, targets = batches[index]
        count, missing = targets.numel(), batches.batch_size - len(tokens)
        if missing:  # the last batch: rows that do not count keep the shape, which the model is compiled for
            tokens, targets = F.pad(tokens, (0, 0, 0, missing)), F.pad(targets, (0, 0, 0, missing), value=-100)
        with autocast:
            loss = model(tokens.to(distributed.device), targets.to(distributed.device))
        total, tokens_seen = total + loss.item() * count, tokens_seen + count
    model.train()
    if distributed.world > 1:
        sums = torch.tensor([total, tokens_seen], dtype=torch.float64, device=distributed.device)
        dist.all_reduce(sums)
        total, tokens_seen = sums.tolist()
    return total / tokens_seen


def start_distributed(config):
    """Join torchrun's process group, if there is one, and take this process's device."""
    device = resolve_device(config.device)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        return Distributed(0, 1, device)
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return Distributed(dist.get_rank(), world, device)


def open_on_all_ranks(config, distributed):
    """The corpus: the first rank prepares it, the others then find it prepared, or fail with its error."""
    arguments = (config.data, config.tokenizer, config.input or None)
    error = None
    if distributed.rank == 0:
        try:
            corpus = open_corpus(*arguments)
        except (ValueError, OSError) as failure:
            error = str(failure)
    if distributed.world > 1:
        shared = [error]
        dist.broadcast_object_list(shared, src=0)
        error = shared[0]
    if error is not None:
        raise ValueError(error)
    return corpus if distributed.rank == 0 else open_corpus(*arguments, quiet=True)


def train(config):
    """One run; returns the best validation loss in nats per token."""
    distributed = start_distributed(config)
    rank, world, device = distributed
    is_main = rank == 0
    kind = torch.device(device).type

    # The share of one rank, in micro-batches. The global batch depends on neither.
    share = config.batch_size // world
    micro_batch = config.micro_batch or share
    if share * world != config.batch_size or share % micro_batch:
        raise ValueError(
            f"batch_size={config.batch_size} must be a multiple of {world} GPUs x micro_batch={micro_batch}; "
            "change either"
        )

    corpus = open_on_all_ranks(config, distributed)
    batches = Batches(corpus.train, config.block_size, config.batch_size, config.seed)
    eval_micro_batches = (
        config.eval_batches * (config.batch_size // micro_batch) or None
    )  # as many tokens on any machine
    validation = validation_batches(corpus.val, config.block_size, micro_batch, eval_micro_batches)
    bits_per_nat = 1 / math.log(2) / corpus.bytes_per_token

    # Model: from its seed, or from the checkpoint of the run to go on with.
    torch.manual_seed(config.seed)
    model = GPT(config.model(corpus.tokenizer.n_vocab)).to(device)
    dtype = resolve_dtype(config.dtype, device)
    optimizer = torch.optim.AdamW(
        model.parameter_groups(config.weight_decay),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=kind == "cuda",
    )
    scaler = torch.amp.GradScaler(kind, enabled=dtype == torch.float16)
    autocast = torch.autocast(kind, dtype) if dtype != torch.float32 else nullcontext()
    start, best = 0, math.inf
    torch.manual_seed(config.seed + 1 + rank)  # dropout differs between ranks, the weights do not
    if config.resume:
        folder = Path(config.resume)
        path = folder / "checkpoint.pt"
        contents = load_checkpoint(path, ("tokenizer_hash", "optimizer", "scaler", "step", "best", "random"))
        if contents["tokenizer_hash"] != fingerprint(corpus.tokenizer):
            raise ValueError(
                f"checkpoint {path} was trained with another tokenizer than the corpus now has; prepare it anew"
            )
        load_weights(model, contents, path)
        options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(contents["optimizer"])
        for group, option in zip(optimizer.param_groups, options, strict=True):
            group.update(option)  # the flags of this process, not the checkpoint's
        scaler.load_state_dict(contents["scaler"])
        start, best = contents["step"], contents["best"]
        if world == 1:
            restore_random_state(contents["random"], kind)
        if start >= config.steps:
            raise ValueError(f"run {folder} is finished at step {start}; give more --steps to go on")
        if is_main:
            write_config(folder, config)
    else:
        with torch.no_grad(), autocast:  # what cannot run on this device fails here, before the run's folder exists
            model.eval()(batches.batch(0, slice(1))[0].to(device))
        model.train()
        folder = new_run(config.name) if is_main else None
        if is_main:
            write_config(folder, config)

    raw_model = model
    if kind == "cuda":
        torch.set_float32_matmul_precision("high")
        if config.compile:
            model = torch.compile(model)
    network = model  # evaluated as it is: a rank may have no batch, which DDP would wait for
    if world > 1:
        model = DistributedDataParallel(model, device_ids=[device] if kind == "cuda" else None, broadcast_buffers=False)

    try:
        report = Report(
            folder,
            config,
            bits_per_nat=bits_per_nat,
            flops_per_step=raw_model.flops_per_token() * config.batch_size * config.block_size,
            peak=peak_flops(device) * world if peak_flops(device) else None,
            start=start,
            enabled=is_main,
        )
    except ValueError:  # wandb does not start: leave no empty run behind
        if is_main and not config.resume:
            shutil.rmtree(folder)
        raise
    if is_main:
        describe(config, raw_model, corpus, distributed, dtype, folder)

    for step in range(start, config.steps + 1):
        if (step % config.eval_every == 0 and step > start) or step in (0, config.steps):
            if kind == "cuda":
                torch.cuda.synchronize()  # the steps still queued are not the evaluation's
            since = time.perf_counter()
            val_loss = evaluate(network, validation, autocast, distributed)
            report.evaluation(step, val_loss, is_best=0 < step and val_loss < best)
            if is_main and step > start:
                contents = {
                    "config": asdict(config),
                    "model_config": asdict(raw_model.config),
                    "model": raw_model.state_dict(),
                    "tokenizer": to_state(corpus.tokenizer),
                    "tokenizer_hash": fingerprint(corpus.tokenizer),
                    "step": step,
                    "val_loss": val_loss,
                }
                if val_loss < best:
                    save_checkpoint(folder / "best.pt", **contents)
                save_checkpoint(
                    folder / "checkpoint.pt",
                    **contents,
                    best=min(best, val_loss),
                    optimizer=optimizer.state_dict(),
                    scaler=scaler.state_dict(),
                    random=random_state(kind),
                )
            if step > 0:
                best = min(best, val_loss)
            report.pause(since)
        if step == config.steps:
            break  # config.steps updates, then one last evaluation

        rate = learning_rate(step, config)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss_sum = torch.zeros((), device=device)
        for first in range(rank * share, (rank + 1) * share, micro_batch):
            tokens, targets = batches.batch(step, slice(first, first + micro_batch))
            if kind == "cuda":  # pinned, so that the copy overlaps with the step before
                tokens, targets = tokens.pin_memory(), targets.pin_memory()
            tokens, targets = tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            last = first + micro_batch == (rank + 1) * share
            with nullcontext() if last or world == 1 else model.no_sync(), autocast:
                loss = model(tokens, targets) * (micro_batch / share)
            with nullcontext() if last or world == 1 else model.no_sync():
                scaler.scale(loss).backward()
            loss_sum += loss.detach()
        scaler.unscale_(optimizer)
        grad_norm = clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

        if (step + 1) % config.log_every == 0:
            if world > 1:
                dist.all_reduce(loss_sum)
            # .item() waits for the device: the only time the host does so in a plain step
            report.step(step + 1, loss_sum.item() / world, rate, grad_norm.item())

    report.close()
    if is_main:
        print(f"best val loss {best:.4f} nats/token = {best * bits_per_nat:.4f} bits/byte; run in {folder}")
        print("sample from it: python sample.py")
    return best


def describe(config, model, corpus, distributed, dtype, folder):
    """The first lines of a run: what trains where, on what."""
    device, network = distributed.device, model.config
    chip = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{torch.get_num_threads()} threads"
    parameters = sum(p.numel() for p in model.parameters())
    print(f"run        {folder}")
    print(f"device     {device} ({chip}) x {distributed.world}, {str(dtype).removeprefix('torch.')}")
    print(
        f"model      {parameters:,} parameters: {network.n_layer} layers, {network.n_head} heads"
        f" ({network.kv_heads} kv), width {network.n_embd}, context {network.block_size}"
    )
    print(
        f"data       {corpus.source}: {len(corpus.train):,} training and {len(corpus.val):,} validation tokens,"
        f" tokenizer {corpus.tokenizer.name} of {corpus.tokenizer.n_vocab:,}"
    )
    tokens = config.batch_size * config.block_size
    epochs = config.steps * tokens / len(corpus.train)
    print(f"step       {tokens:,} tokens, {config.steps:,} steps = {epochs:.1f} epochs")


def write_config(folder, config):
    with atomic_file(folder / "config.json") as file:
        file.write((json.dumps(asdict(config), indent=2) + "\n").encode())


def random_state(kind):
    """State of torch's generators, for the checkpoint."""
    state = {"cpu": torch.get_rng_state()}
    if kind == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state, kind):
    torch.set_rng_state(state["cpu"])
    if kind == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def main(argv):
    try:
        train(load_config(argv))
    except (ValueError, OSError) as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
