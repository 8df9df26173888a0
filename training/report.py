"""What a run reports: lines on the terminal, metrics.jsonl, loss.png, wandb."""

import html
import json
import math
import os
import re
import sys
import time
from contextlib import contextmanager
from datetime import timedelta

import torch

from data import atomic_file
from training.config import resolve_dtype

# Dense bf16/fp16 tensor-core peaks from the vendors' data sheets, in TFLOP/s, by a part of the device's name.
PEAK_TFLOPS = {
    "H200": 989, "H100 PCIe": 756, "H100": 989, "H800": 989, "H20": 148, "B200": 2250, "B100": 1800, "GB200": 2500,
    "A100": 312, "A800": 312, "A40": 150, "A30": 165, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181, "L4": 121,
    "V100": 125, "T4": 65, "RTX 6000 Ada": 364, "RTX 5090": 210, "RTX 4090": 165, "RTX 4080": 97, "RTX 3090": 71,
    "RTX 3080": 60,
}  # fmt: skip

PLOT_SECONDS = 30  # between two drawings of loss.png; one takes as long as a hundred steps of a small network


class Report:
    """Writes the reports of a run; ranks other than 0 write nothing.

    Args:
        folder: the run's folder. config: Config. model: GPT. corpus: Corpus. ranks: Ranks.
        start: first step of this process.
    """

    def __init__(self, folder, config, model, corpus, ranks, start):
        self.folder, self.config, self.enabled = folder, config, ranks.rank == 0
        self.bits_per_nat = 1 / math.log(2) / corpus.bytes_per_token
        self.tokens_per_step = config.batch_size * config.block_size
        self.flops_per_step = model.flops_per_token() * self.tokens_per_step
        peak = peak_flops(ranks.device)
        self.peak = peak and peak * ranks.world
        self.began = self.last_time = self.plotted = time.perf_counter()
        self.first_step = self.last_step = start
        self.pace_since = self.began, start  # time and step from which the time left is estimated
        self.paused, self.seconds_before, self.wandb = 0.0, 0.0, None
        if self.enabled:
            # Steps after `start` are repeated, and so is the evaluation of step 0 if that is the start.
            kept = [record for record in read_metrics(folder) if 0 < start >= record["step"]]
            self.seconds_before = kept[-1].get("seconds", 0.0) if kept else 0.0
            with atomic_file(folder / "metrics.jsonl") as file:
                file.write("".join(json.dumps(record) + "\n" for record in kept).encode())
            if config.wandb != "off":
                with only_warn("starting wandb"):
                    self.wandb = start_wandb(folder, config.wandb)

    def describe(self, model, corpus, ranks, micro_batch):
        """Print the first lines of a run: what is trained, where, on which data."""
        if not self.enabled:
            return
        config, device = self.config, ranks.device
        chip = torch.cuda.get_device_name(device) if ranks.on_gpu else f"{torch.get_num_threads()} threads"
        dtype = str(resolve_dtype(config.dtype, device)).removeprefix("torch.")
        how = " with FSDP" if ranks.sharded else " with DDP" if ranks.world > 1 else ""
        parameters = sum(p.numel() for p in model.parameters())
        epochs = config.steps * self.tokens_per_step / len(corpus.train)
        print(
            f"run        {self.folder} (process {os.getpid()})\n"
            f"device     {device} ({chip}) x {ranks.world}{how}, {dtype}\n"
            f"model      {parameters:,} parameters: {config.n_layer} layers, {config.n_head} heads "
            f"({config.kv_heads} kv), width {config.n_embd}, context {config.block_size}\n"
            f"data       {corpus.source}: {len(corpus.train):,} training and {len(corpus.val):,} validation tokens, "
            f"tokenizer {corpus.tokenizer.name} of {corpus.tokenizer.n_vocab:,}\n"
            f"step       {self.tokens_per_step:,} tokens ({config.batch_size:,} sequences, {micro_batch:,} at a time), "
            f"{config.steps:,} steps = {epochs:.1f} epochs",
            flush=True,
        )

    def start(self, parts):
        """Print where the time until the end of the first step went: {part: seconds}, in this order.

        The first step counts neither in tokens per second nor in the time left, because it may compile, unless it has a
        line of its own.
        """
        if (self.first_step + 1) % self.config.log_every:
            self.last_time, self.last_step, self.paused = time.perf_counter(), self.first_step + 1, 0.0
            self.pace_since = self.last_time, self.last_step
        if self.enabled:
            each = ", ".join(f"{seconds:.1f} s {part}" for part, seconds in parts.items())
            show(f"start      {sum(parts.values()):.1f} s: {each}")

    def step(self, step, learning_rate, loss, grad_norm, skipped):
        """Record a training step. loss (nats per token), grad_norm, skipped: [] tensors, whose values it waits for."""
        loss, grad_norm, skipped = torch.stack((loss, grad_norm, skipped)).tolist()
        if not self.enabled:
            return
        now = time.perf_counter()
        seconds = max(now - self.last_time - self.paused, 1e-9) / (step - self.last_step)
        since, since_step = self.pace_since
        left = (self.config.steps - step) * (now - since) / (step - since_step)
        if self.last_step == self.first_step:
            self.pace_since = now, step  # the first step had a line of its own
        self.last_time, self.last_step, self.paused = now, step, 0.0
        record = dict(
            step=step, seconds=self.seconds_before + now - self.began, loss=loss, learning_rate=learning_rate,
            grad_norm=grad_norm, skipped_steps=int(skipped),
            tokens_per_second=self.tokens_per_step / seconds, tflops=self.flops_per_step / seconds / 1e12,
        )  # fmt: skip
        if self.peak:
            record["mfu"] = self.flops_per_step / seconds / self.peak
        if torch.cuda.is_initialized():
            record["peak_memory"] = torch.cuda.max_memory_allocated()  # bytes, of rank 0's GPU
        self._write(record)
        speed = f"MFU {record['mfu']:.1%}" if self.peak else f"{record['tflops']:.3g} TFLOP/s"
        show(
            f"step {step}/{self.config.steps}  loss {loss:.4f}  lr {learning_rate:.2e}  "
            f"{record['tokens_per_second']:,.0f} tokens/s  {speed}  {timedelta(seconds=round(left))} left"
            + (f"  {skipped:.0f} skipped" if skipped else ""),
            progress=True,
        )

    def evaluation(self, step, loss, is_best):
        """Record the validation loss (nats per token), and draw loss.png if the last drawing is some time ago."""
        if not self.enabled:
            return
        bits, now = loss * self.bits_per_nat, time.perf_counter()
        seconds = self.seconds_before + now - self.began  # since training began, without pauses between processes
        self._write({"step": step, "seconds": seconds, "val_loss": loss, "val_bpb": bits})
        mark = "  (best)" if is_best else ""
        show(f"step {step}/{self.config.steps}  val loss {loss:.4f} nats/token  {bits:.4f} bits/byte{mark}")
        if now - self.plotted > PLOT_SECONDS:
            plot_losses(self.folder, self.bits_per_nat)
            self.plotted = time.perf_counter()

    def sample(self, step, write):
        """Print what write() returns, a sample of the model's text, and log it to wandb."""
        if not self.enabled:
            return
        with self.pause(), only_warn("writing a sample"):
            text = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in write())
            show(f"sample after {step} steps:\n{text}\n")
            if self.wandb:
                import wandb

                self._log({"sample": wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step)

    @contextmanager
    def pause(self):
        """Leave the time of this block, spent on evaluation and saving, out of the tokens per second."""
        since = time.perf_counter()
        yield
        self.paused += time.perf_counter() - since

    def close(self, step, best):
        """Print how the run ended, then draw loss.png; in this order, as torchrun kills a stopping rank after 30 s."""
        if not self.enabled:
            return
        if step < self.config.steps:
            command = "torchrun ... train.py" if "WORLD_SIZE" in os.environ else "python train.py"
            show(f"stopped at step {step}; resume with: {command} --resume {self.folder}")
        else:
            bits = best * self.bits_per_nat
            show(f"best val loss {best:.4f} nats/token = {bits:.4f} bits/byte; run in {self.folder}")
            show("sample from it: python sample.py")
        plot_losses(self.folder, self.bits_per_nat)
        if self.wandb:
            with only_warn("closing wandb"):
                self.wandb.finish()

    def _write(self, record):
        # JSON has no NaN and no infinity
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with only_warn("writing metrics.jsonl"), open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
        if self.wandb:
            self._log(record, record["step"])

    def _log(self, values, step):
        run, self.wandb = self.wandb, None  # not used again after an error
        with only_warn("logging to wandb"):
            run.log(values, step=step)
            self.wandb = run


def start_wandb(folder, mode):
    """A wandb run, with the previous id if this run is resumed."""
    import wandb  # takes a second, and few runs use it

    id_file = folder / "wandb_id"
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "gpt"), name=folder.name, dir=folder, resume="allow", mode=mode,
        id=id_file.read_text() if id_file.exists() else None, config=json.loads((folder / "config.json").read_text()),
    )  # fmt: skip
    id_file.write_text(run.id)
    return run


@contextmanager
def only_warn(action):
    """Print a warning if this block fails, so that a report cannot end the run."""
    try:
        yield
    except Exception as error:  # a full disk, or wandb, whose errors have no common base class
        reason = (str(error) or type(error).__name__).splitlines()[0]
        print(f"warning: {action} failed ({reason}); training goes on", file=sys.stderr)


def show(line, progress=False):
    """Print a line. On a terminal it replaces the progress line before it, if that was the last one."""
    terminal = sys.stdout.isatty()
    print(f"\r\x1b[K{line}" if terminal else line, end="" if progress and terminal else "\n", flush=True)


def peak_flops(device):
    """Peak FLOP/s of a CUDA device; None if the chip is not in the table or the device is no GPU."""
    if torch.device(device).type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [part for part in PEAK_TFLOPS if re.search(rf"\b{part}\b", name)]
    return PEAK_TFLOPS[max(known, key=len)] * 1e12 if known else None


def read_metrics(folder):
    """The records of a run's metrics.jsonl; damaged lines, such as one that a crash cut short, are left out."""
    path = folder / "metrics.jsonl"
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if is_record(record):
            records.append(record)
        else:
            print(f"warning: a line of {path} is damaged and left out", file=sys.stderr)
    return records


def is_record(value):
    """Whether this is a dict with a step whose values are numbers or None."""
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        return False
    return all(number is None or isinstance(number, int | float) for number in value.values())


@only_warn("drawing loss.png")
def plot_losses(folder, bits_per_nat):
    """Draw loss.png from metrics.jsonl: training and validation loss, with bits per byte on the right axis."""
    from matplotlib.figure import Figure  # takes a second, which the start of a run need not wait for

    records = read_metrics(folder)
    val = [(r["step"], r["val_loss"]) for r in records if r.get("val_loss") is not None]
    if not val:
        return
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis = figure.subplots()
    draw_losses(axis, records, ("#9aa7b5", "#c0392b"), ("training", "validation"))
    step, best = min(val, key=lambda point: point[1])
    axis.axhline(best, color="#c0392b", linewidth=0.6, linestyle=":")
    title = f"{folder.name}: best {best:.4f} nats/token = {best * bits_per_nat:.3f} bits/byte at {step}"
    axis.set_title(title, parse_math=False)  # a name may contain $
    axis.set(xlabel="step", ylabel="loss (nats per token)")
    right = axis.secondary_yaxis("right", functions=(lambda x: x * bits_per_nat, lambda x: x / bits_per_nat))
    right.set_ylabel("bits per byte")
    axis.legend(frameon=False)
    figure.savefig(folder / "loss.png", dpi=130)


def draw_losses(axis, records, colors, labels, x="step", per_x=1, per_nat=1):
    """Draw the training loss thin and the validation loss thick on an axis of matplotlib.

    Args:
        records: of metrics.jsonl. colors, labels: of the two lines; a label of None is not in the legend.
        x: field on the x axis. per_x, per_nat: factors of x and of the loss in nats per token.
    """
    styles = dict(linewidth=1), dict(linewidth=1.8, marker="o", markersize=3)
    for field, color, label, style in zip(("loss", "val_loss"), colors, labels, styles, strict=True):
        points = [(r[x] * per_x, r[field] * per_nat) for r in records if r.get(field) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), color=color, label=label, **style)
    axis.grid(alpha=0.25)
