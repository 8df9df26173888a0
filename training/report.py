"""What a run reports: lines on the terminal, metrics.jsonl, loss.png, wandb."""

import json
import math
import os
import re
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from shutil import get_terminal_size

import torch

from data.files import atomic_file
from data.loader import windowed
from errors import quote
from training.device import resolve_dtype

# Dense bf16/fp16 tensor-core TFLOP/s from the vendors' data sheets, by the first of these parts in the device's name.
PEAK_TFLOPS = {
    "H200": 989, "H100 PCIe": 756, "H100": 989, "H800": 989, "H20": 148, "B200": 2250, "B100": 1800, "GB200": 2500,
    "A100": 312, "A800": 312, "A40": 150, "A30": 165, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181, "L4": 121,
    "V100": 125, "T4": 65, "RTX 6000 Ada": 364, "RTX 5090": 210, "RTX 4090": 165, "RTX 4080": 97, "RTX 3090": 71,
    "RTX 3080": 60,
}  # fmt: skip

WANDB_SECONDS = 60  # to wait for wandb at the end of a run
PLOT_SECONDS = 30  # between two drawings of loss.png; one takes as long as a hundred steps of a small network
COLORS = ("#c0392b", "#2471a3", "#1e8449", "#b9770e", "#7d3c98", "#117a65", "#5d6d7e", "#d35480")
STYLES = ("-", "--", ":", "-.")  # the next one after each eight runs
X_LABELS = {"step": "step", "tokens": "training tokens", "seconds": "time since training began (s)"}
FALL = 0.15  # of a run, which a picture of several runs may cut off at the top
LEGEND_WIDTH = 110  # characters
Y_LABELS = {"loss": "loss (nats per token)", "bpb": "loss (bits per byte)"}


class Report:
    """Writes the reports of a run; ranks other than 0 write nothing. start: first step of this process."""

    def __init__(self, folder, config, model, corpus, ranks, start):
        self.folder, self.config, self.enabled = folder, config, ranks.rank == 0
        self.val = windowed(corpus.val, config.block_size)
        self.bits_per_nat = self.val.counted / self.val.text_bytes / math.log(2)
        self.tokens_per_step = config.batch_size * config.block_size
        self.flops_per_step = model.flops_per_token() * self.tokens_per_step
        self.peak = peak_flops(ranks.device) * ranks.world
        self.began = self.plotted = self.first_began = self.lap_began = time.perf_counter()
        self.first_step = self.lap_step = start
        self.val_loss, self.wandb = None, None
        self.sync_later = f"to send the rest later, type: wandb sync {quote(folder / 'wandb' / 'latest-run')}"
        # Steps after `start` are repeated, and so is the evaluation of step 0 if that is the start.
        found = []
        if self.enabled:
            with only_warn("reading metrics.jsonl"):
                found = read_metrics(folder)
        self.kept = [record for record in found if 0 < start >= record["step"]]
        self.waiting = []  # records before the end of the first step; until then a resumed run stays as it was
        self.began -= self.kept[-1].get("seconds", 0) if self.kept else 0  # the time between processes does not count

    def describe(self, model, corpus, batches, ranks, micro_batch):
        """Print the first lines of a run: what is trained, where, on which data."""
        if not self.enabled:
            return
        config, device = self.config, ranks.device
        chip = torch.cuda.get_device_name(device) if ranks.on_gpu else f"{torch.get_num_threads()} threads"
        dtype = str(resolve_dtype(config.dtype, device)).removeprefix("torch.")
        how = " with FSDP" if ranks.sharded else " with DDP" if ranks.world > 1 else ""
        parameters = sum(p.numel() for p in model.parameters())
        epochs = config.steps * config.batch_size / batches.windows_per_epoch
        train, val = batches.tokens.counted, self.val.counted
        counted = f"{train:,} training and {val:,} validation tokens"
        if corpus.train.turns:
            counted += " of answers"
            if left_out := corpus.train.counted + corpus.val.counted - train - val:
                counted += f" ({left_out:,} more are left out: too long for block_size with their question)"
        fields = dict(
            run=f"{self.folder} (process {os.getpid()})",
            device=f"{device} ({chip}) x {ranks.world}{how}, {dtype}",
            model=f"{parameters:,} parameters: {config.n_layer} layers, {config.n_head} heads "
            f"({config.kv_heads} kv), width {config.n_embd}, context {config.block_size}",
            data=f"{corpus.source}: {counted}, tokenizer {corpus.tokenizer.name} of {corpus.tokenizer.n_vocab:,}",
            step=f"{self.tokens_per_step:,} tokens ({config.batch_size:,} sequences, {micro_batch:,} at a time), "
            f"{config.steps:,} steps = {epochs:.1f} epochs",
        )
        if config.depth:
            fields["depth"] = (
                f"{config.depth}: {config.steps * self.tokens_per_step:,} tokens, rate {config.learning_rate:.2g}, "
                f"weight decay {config.weight_decay:.2g}, dropout {config.dropout:.2g}"
            )
        for name, text in fields.items():
            show(f"{name:11}{text}")

    def start(self):
        """Begin to log and to measure at the end of the first step, which may compile; its own line includes it."""
        if self.enabled:
            began = time.perf_counter()
            with only_warn("writing metrics.jsonl"), atomic_file(self.folder / "metrics.jsonl") as file:
                file.write("".join(json.dumps(record) + "\n" for record in self.kept).encode())
            if self.config.wandb != "off":
                with only_warn("starting wandb"):
                    self.wandb = start_wandb(self.folder, self.config)
            waiting, self.waiting = self.waiting, None
            for record in waiting:
                self._write(record)
            seconds = time.perf_counter() - began  # without a network wandb takes minutes
            self.began, self.lap_began = self.began + seconds, self.lap_began + seconds
        self.first_step, self.first_began = self.first_step + 1, time.perf_counter()
        if self.first_step % self.config.log_every:
            self.lap_step, self.lap_began = self.first_step, self.first_began

    @contextmanager
    def pause(self):
        """Leave the time of this block, spent on evaluation, saving or a sample, out of the tokens per second."""
        began = time.perf_counter()
        yield
        self.lap_began += time.perf_counter() - began

    def step(self, step, learning_rate, loss, grad_norm, skipped):
        """Record a training step. loss (nats per token), grad_norm, skipped: [] tensors, whose values it waits for."""
        loss, grad_norm, skipped = torch.stack((loss, grad_norm, skipped)).tolist()
        if not self.enabled:
            return
        now, steps = time.perf_counter(), self.config.steps
        seconds = (now - self.lap_began) / (step - self.lap_step)
        self.lap_began, self.lap_step = now, step
        record = dict(
            step=step, seconds=now - self.began, loss=loss, learning_rate=learning_rate,
            grad_norm=grad_norm, skipped_steps=int(skipped),
            tokens_per_second=self.tokens_per_step / seconds, tflops=self.flops_per_step / seconds / 1e12,
        )  # fmt: skip
        if self.peak:
            record["mfu"] = self.flops_per_step / seconds / self.peak
        if torch.cuda.is_initialized():
            record["peak_memory"] = torch.cuda.max_memory_allocated()  # bytes, of rank 0's GPU
        self._write(record)
        fields = [f"step {step}/{steps}", f"loss {loss:.4f}"]
        fields += [f"val {self.val_loss:.4f}"] if self.val_loss is not None else []
        fields += [f"{skipped:.0f} skipped"] if skipped else []
        left = "?"  # after the first step, which may compile
        if step > self.first_step:
            seconds = (steps - step) * (now - self.first_began) / (step - self.first_step)  # with evaluations
            left = timedelta(seconds=round(seconds))
        fields += [f"{record['tokens_per_second']:,.0f} tokens/s", f"{left} left"]
        fields += [f"norm {grad_norm:.2f}", f"lr {learning_rate:.2e}"]
        fields += [f"MFU {record['mfu']:.1%}"] if self.peak else []
        show_progress(fields)

    def evaluation(self, step, loss, is_best):
        """Record the validation loss (nats per token), and draw loss.png if the last drawing is some time ago."""
        if not self.enabled:
            return
        bits, self.val_loss = loss * self.bits_per_nat, loss
        self._write({"step": step, "seconds": time.perf_counter() - self.began, "val_loss": loss, "val_bpb": bits})
        mark = "  (best)" if is_best else ""
        show(f"step {step}/{self.config.steps}  val loss {loss:.4f} nats/token  {bits:.4f} bits/byte{mark}")
        if time.perf_counter() - self.plotted > PLOT_SECONDS:
            plot_losses(self.folder)
            self.plotted = time.perf_counter()

    def sample(self, step, write):
        """Print what write() returns, a sample of the model's text."""
        if not self.enabled:
            return
        with self.pause(), only_warn("writing a sample"):
            show(f"sample after {step} steps:\n{printable(write())}\n")

    def close(self, step, write=None):
        """Print how the run ended, then draw loss.png; in this order, as torchrun kills a stopping rank after 30 s.

        write: returns a sample of the model's text, which the end of a finished run shows; or None.
        """
        if not self.enabled:
            return
        if step < self.config.steps:
            command = "torchrun ... train.py" if "WORLD_SIZE" in os.environ else "python train.py"
            show(f"stopped at step {step}; resume with: {command} --resume {quote(self.folder)}")
        else:
            with only_warn("reading metrics.jsonl"):
                if found := best_of(read_metrics(self.folder)):
                    show(f"best val loss {in_words(found)} of {self.config.steps}")
            trained = timedelta(seconds=round(time.perf_counter() - self.began))
            show(f"trained for {trained}; losses are drawn in {self.folder / 'loss.png'}")
            flag = " --chat" if self.config.data == "chat" else ""
            show(f"sample from it: python sample.py {quote(self.folder)}{flag}")
            if write:
                self.sample(step, write)
        if self.waiting is None:
            plot_losses(self.folder)
        if self.wandb:
            with only_warn("closing wandb", self.sync_later):
                self.wandb.finish()

    def _write(self, record):
        if self.waiting is not None:
            self.waiting.append(record)
            return
        # JSON has no NaN and no infinity
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with only_warn("writing metrics.jsonl"), open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
        if self.wandb:
            run, self.wandb = self.wandb, None  # not used again after an error
            with only_warn("logging to wandb", self.sync_later):
                run.log(record)
                self.wandb = run


def start_wandb(folder, config):
    """A wandb run, with the previous id if this run is resumed."""
    import wandb  # takes a second, and few runs use it

    id_file = folder / "wandb_id"
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "gpt"), name=folder.name, dir=folder, resume="allow", mode=config.wandb,
        id=id_file.read_text() if id_file.exists() else None, config=asdict(config),
        settings=dict(
            finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT", WANDB_SECONDS)), finish_timeout_raises=True,
        ),
    )  # fmt: skip
    # wandb's own step only rises, so it would drop the steps that a resumed run repeats
    run.define_metric("*", step_metric="step")
    id_file.write_text(run.id)
    return run


@contextmanager
def only_warn(action, remedy="training goes on"):
    """Print a warning if this block fails, so that a report cannot end the run."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a full disk, or wandb, whose errors have no common base class
        reason = (str(error) or type(error).__name__).splitlines()[0]
        show(f"warning: {action} failed ({reason}); {remedy}", file=sys.stderr)


def show(text, end="\n", file=None):
    """Print a text. On a terminal it replaces the progress line, if that was printed last."""
    file = file or sys.stdout
    print(f"\r\x1b[K{text}" if file.isatty() else text, end=end, file=file, flush=True)


def show_progress(fields):
    """Print a progress line; on a terminal, its first fields, as many as fit, and the next line will replace it."""
    if not sys.stdout.isatty():
        return show("  ".join(fields))
    room = get_terminal_size().columns - 1  # a full line would wrap on some terminals
    while len(fields) > 1 and len("  ".join(fields)) > room:
        fields = fields[:-1]
    show("  ".join(fields)[:room], end="")


def printable(text):
    """The text without control characters, which could change the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def peak_flops(device):
    """Peak FLOP/s of a CUDA device; 0 if the chip is not in the table or the device is no GPU."""
    if torch.device(device).type != "cuda":
        return 0
    name = torch.cuda.get_device_name(device)
    return 1e12 * next((peak for part, peak in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", name)), 0)


def read_metrics(folder):
    """The records of a run's metrics.jsonl; damaged lines, such as one that a crash cut short, are left out."""
    path = folder / "metrics.jsonl"
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            int(record["step"])
            records.append(record)
        except (ValueError, TypeError, KeyError):
            print(f"warning: a line of {path} is damaged and left out", file=sys.stderr)
    return records


def best_of(records):
    """The record with the lowest validation loss after step 0; None if there is none."""
    evaluated = [record for record in records if record["step"] and record.get("val_loss") is not None]
    return min(evaluated, key=lambda record: record["val_loss"], default=None)


def in_words(record):
    """An evaluation, as in 2.9380 nats/token = 1.8839 bits/byte at step 400."""
    return f"{record['val_loss']:.4f} nats/token = {record['val_bpb']:.4f} bits/byte at step {record['step']}"


def bits_per_nat(records):
    """Bits per byte = this times nats per token, as in the records of a run; None before its first evaluation."""
    return next((record["val_bpb"] / record["val_loss"] for record in records if record.get("val_loss")), None)


@only_warn("drawing loss.png")
def plot_losses(folder):
    """Draw loss.png from metrics.jsonl, unless there is no validation loss yet."""
    records = read_metrics(folder)
    if bits_per_nat(records):
        draw_losses(folder / "loss.png", [(folder.name, records)])


def draw_losses(path, runs, x="step", y="loss"):
    """Draw the losses of runs into an image: training thin, validation thick, the best evaluation as a ring.

    Args:
        path: of the image; its suffix says which kind.
        runs: list of (label, records of metrics.jsonl). A single run has its best loss in the title.
        x: step, tokens or seconds, a field of the records. y: loss or bpb.
    """
    from matplotlib.figure import Figure  # takes a second, which the start of a run need not wait for
    from matplotlib.font_manager import fontManager

    runs = [(f"\u200b{label}", records) for label, records in runs]  # a legend leaves out names that begin with _
    alone = len(runs) == 1
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    title, late = "training (thin) and validation (thick); the ring is the best", []
    for number, (label, records) in enumerate(runs):
        color, style = COLORS[number % len(COLORS)], STYLES[number // len(COLORS) % len(STYLES)]
        per_nat, best = bits_per_nat(records) if y == "bpb" else 1, best_of(records)
        train, val = (
            [(record[x], record[field] * per_nat) for record in records if record.get(field) is not None]
            for field in ("loss", "val_loss")
        )
        labels = ("training", "validation") if alone else (None, label) if val else (label, None)
        axis.plot(*zip(*train, strict=True), color=color, linestyle=style, label=labels[0], linewidth=0.8, alpha=0.5)
        axis.plot(*zip(*val, strict=True), color=color, linestyle=style, label=labels[1], linewidth=1.8)
        if best:
            axis.scatter(best[x], best["val_loss"] * per_nat, 70, facecolors="none", edgecolors=color)
        if alone:
            title = f"{label}: best {in_words(best)}" if best else label
        end = max(record[x] for record in records)
        late += [loss for where, loss in train + val if where >= FALL * end]
    if not alone:
        axis.set_ylim(top=max(late))  # the first fall, alike in all runs, would press the rest together
    axis.set(xlabel=X_LABELS[x], ylabel=Y_LABELS[y])
    axis.grid(alpha=0.25)
    if alone and y == "loss" and (per_nat := bits_per_nat(runs[0][1])):
        right = axis.secondary_yaxis("right", functions=(lambda nats: nats * per_nat, lambda bits: bits / per_nat))
        right.set_ylabel("bits per byte")
    columns = max(1, LEGEND_WIDTH // (max(len(label) for label, _ in runs) + 6))
    legend = figure.legend(loc="outside lower left", frameon=False, fontsize="small", ncols=columns)
    fonts = ["DejaVu Sans", *sorted({font.name for font in fontManager.ttflist if "CJK" in font.name})]
    for text in [axis.set_title(title), *legend.get_texts()]:
        text.set_parse_math(False)  # a name may contain $
        text.set_family(fonts)  # or be Chinese, Japanese or Korean
        text.set_text(text.get_text().lstrip("\u200b"))
    with warnings.catch_warnings(action="ignore"):  # about characters that no font has
        figure.savefig(path, dpi=130)
