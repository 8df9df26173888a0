"""What a run reports: lines on the terminal, metrics.jsonl, loss.png, wandb."""

import json
import math
import os
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from shutil import get_terminal_size

import torch

from data.chat import END
from data.files import atomic_file
from data.loader import windowed
from device import resolve_dtype
from errors import fold, quote
from generation import Generator
from generation.text import marked
from training.curves import best_of, in_words, plot_losses, read_metrics

# Dense bf16/fp16 tensor-core TFLOP/s from the vendors' data sheets, by the first of these parts in the device's name.
PEAK_TFLOPS = {
    "H200": 989, "H100 PCIe": 756, "H100": 989, "H800": 989, "H20": 148, "B200": 2250, "B100": 1800, "GB200": 2500,
    "A100": 312, "A800": 312, "A40": 150, "A30": 165, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181, "L4": 121,
    "V100": 125, "T4": 65, "RTX 6000 Ada": 364, "RTX 5090": 210, "RTX 4090": 165, "RTX 4080": 97, "RTX 3090": 71,
    "RTX 3080": 60,
}  # fmt: skip

SAMPLE_PROMPT, SAMPLE_TOKENS = 16, 100  # of --sample_every
WANDB_SECONDS = 60  # to wait for wandb at the end of a run
PLOT_SECONDS = 30  # between two drawings of loss.png; one takes as long as a hundred steps of a small network
PROGRESS_SECONDS = 2  # between two progress lines on a terminal, if steps take less
MEASURED = 10  # seconds of steps after which the time left is estimated
LONG = 3600  # seconds left from which a line says so


class Report:
    """Writes the reports of a run; ranks other than 0 write nothing. start: first step of this process."""

    def __init__(self, folder, config, model, corpus, ranks, start):
        self.folder, self.config, self.corpus, self.enabled = folder, config, corpus, ranks.rank == 0
        self.val = windowed(corpus.val, config.block_size)
        self.bits_per_nat = self.val.counted / self.val.text_bytes / math.log(2)
        self.tokens_per_step = config.batch_size * config.block_size
        self.flops_per_step = flops_per_token(model) * self.tokens_per_step
        self.peak = peak_flops(ranks.device) * ranks.world
        self.began = self.plotted = self.first_began = self.lap_began = time.perf_counter()
        self.first_step = self.lap_step = start
        self.val_loss, self.wandb, self.estimated = None, None, False
        self.on_terminal, self.shown = self.enabled and sys.stdout.isatty(), -math.inf  # when a step was last printed
        self.sync_later = f"to send the rest later, type: wandb sync {quote(folder / 'wandb' / 'latest-run')}"
        # Steps after `start` are repeated, and so is the evaluation of step 0 if that is the start.
        self.kept = []
        if self.enabled and start:
            with only_warn("reading metrics.jsonl"):
                self.kept = [record for record in read_metrics(folder) if record["step"] <= start]
        self.waiting = []  # records before the end of the first step; until then a resumed run stays as it was
        self.began -= self.kept[-1].get("seconds", 0) if self.kept else 0  # the time between processes does not count

    def describe(self, model, batches, ranks, micro_batch):
        """Print the first lines of a run: what is trained, where, on which data."""
        if not self.enabled:
            return
        config, corpus, device = self.config, self.corpus, ranks.device
        threads = torch.get_num_threads()
        chip = f"{threads} thread{'s' if threads > 1 else ''}"
        if device == "mps":
            chip = torch.backends.mps.get_name()
        elif ranks.on_gpu:
            chip = torch.cuda.get_device_name(device)
        dtype = str(resolve_dtype(config.dtype, device)).removeprefix("torch.")
        how = f" x {ranks.world}" if ranks.on_gpu or ranks.world > 1 else ""
        how += " with FSDP" if ranks.sharded else " with DDP" if ranks.world > 1 else ""
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
            device=f"{device} ({chip}){how}, {dtype}",
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
            show(fold(f"{name:11}{text}", 11))
        if self.first_step:  # otherwise an evaluation comes first
            self._show_first_step()

    def _show_first_step(self):
        """On a terminal, say what is waited for."""
        if self.on_terminal:
            compiles = ", which compiles kernels: up to a minute, the first time" if torch.cuda.is_initialized() else ""
            show_progress([f"first step{compiles} ..."])

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

    def step(self, step, learning_rate, loss, grad_norm, skipped, logs):
        """Record a training step if it `logs`, and print a line about it; on a terminal, print one every two seconds.

        loss (nats per token), grad_norm, skipped: [] tensors, whose values it waits for if it prints.
        """
        now = time.perf_counter()
        estimates = not self.estimated and step > self.first_step and now > self.first_began + MEASURED
        due = estimates or (self.on_terminal and now > self.shown + PROGRESS_SECONDS)
        if not self.enabled or not (logs or due):
            return
        loss, grad_norm, skipped = torch.stack((loss, grad_norm, skipped)).tolist()
        self.shown = now = time.perf_counter()
        fields = [f"step {step}/{self.config.steps}", f"loss {loss:.4f}"]
        fields += [f"val {self.val_loss:.4f}"] if self.val_loss is not None else []
        fields += [f"{skipped:.0f} skipped"] if skipped else []
        record = dict(
            step=step, seconds=now - self.began, loss=loss, learning_rate=learning_rate, grad_norm=grad_norm,
            skipped_steps=int(skipped),
        )  # fmt: skip
        if step > self.lap_step:  # otherwise this is the first step, which may compile
            rate = (step - self.lap_step) / (now - self.lap_began)
            record |= dict(tokens_per_second=self.tokens_per_step * rate, tflops=self.flops_per_step * rate / 1e12)
            record |= dict(mfu=self.flops_per_step * rate / self.peak) if self.peak else {}
            fields.append(f"{record['tokens_per_second']:,.0f} tokens/s")
        if torch.cuda.is_initialized():
            record["peak_memory"] = torch.cuda.max_memory_allocated()  # bytes, of rank 0's GPU
        left = "?"
        if step > self.first_step:
            a_step = (now - self.first_began) / (step - self.first_step)  # seconds, with evaluations
            seconds = (self.config.steps - step) * a_step
            left = timedelta(seconds=round(seconds))
            self.estimated |= estimates
            if estimates and seconds > LONG:
                show(f"note: {seconds / 3600:,.1f} more hours at this speed; Ctrl-C saves and stops the run")
        fields += [f"{left} left", f"norm {grad_norm:.2f}", f"lr {learning_rate:.2e}"]
        fields += [f"MFU {record['mfu']:.1%}"] if "mfu" in record else []
        if logs or self.on_terminal:
            show_progress(fields)
        if logs:
            self._write(record)
            self.lap_began, self.lap_step = now, step

    def evaluation(self, step, loss, is_best):
        """Record the validation loss (nats per token), and draw loss.png if the last drawing is some time ago."""
        if not self.enabled:
            return
        bits, self.val_loss = loss * self.bits_per_nat, loss
        self._write({"step": step, "seconds": time.perf_counter() - self.began, "val_loss": loss, "val_bpb": bits})
        mark = "  (best)" if is_best else ""
        show(f"step {step}/{self.config.steps}  val loss {loss:.4f} nats/token  {bits:.4f} bits/byte{mark}")
        if self.waiting is not None:
            self._show_first_step()
        if time.perf_counter() - self.plotted > PLOT_SECONDS:
            self._draw()
            self.plotted = time.perf_counter()

    def sample(self, step, model):
        """Print the start of the validation text, continued by a GPT; torch's random state does not change."""
        if not self.enabled:
            return
        with self.pause(), only_warn("writing a sample"):
            tokenizer = self.corpus.tokenizer
            prompt = self.corpus.val.windows([0], min(SAMPLE_PROMPT, self.config.block_size))[0].tolist()
            model.eval()
            try:
                generator = Generator(model, tokenizer, seed=self.config.seed, graph=False)
                with torch.compiler.set_stance("force_eager"):  # it is compiled for the shapes of training only
                    tokens = [token for [token] in generator.tokens([prompt], SAMPLE_TOKENS)]
            finally:
                model.train()
            begins = tokenizer.decode(prompt).rstrip("\N{REPLACEMENT CHARACTER}")  # of a character that is cut off
            text = printable(tokenizer.decode(prompt + tokens).removeprefix(begins))
            text = text.partition(END)[0] if self.corpus.val.turns else text
            title = f"sample after {step} steps, which continues the validation text:"
            show(f"{title}\n{marked(printable(begins))}{text}\n")

    def close(self, step, model=None):
        """Print how the run ended, then draw loss.png; in this order, as torchrun kills a stopping rank after 30 s.

        model: GPT whose text the end of a finished run shows, or None.
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
            if model:
                self.sample(step, model)
        if self.waiting is None:
            self._draw()
        if self.wandb:
            with only_warn("closing wandb", self.sync_later):
                self.wandb.finish()

    def _draw(self):
        with only_warn("drawing loss.png"):
            plot_losses(self.folder)

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
        return print("  ".join(fields), flush=True)
    room = get_terminal_size().columns - 1  # a full line would wrap on some terminals
    while len(fields) > 1 and len("  ".join(fields)) > room:
        fields = fields[:-1]
    show("  ".join(fields)[:room], end="")


def printable(text):
    """The text without control characters, which could change the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def flops_per_token(model):
    """Floating-point operations of a GPT per token, forward and backward, at full context.

    6 per weight of a matmul (the head counts, embedding look-ups do not), and 12 C for each key that a query sees
    in a block: T / 2 on average, as attention is causal (Chowdhery et al. 2022, PaLM, appendix B).
    """
    C, T = model.config.n_embd, model.config.block_size
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    windows = [min(block.attention.window or T, T) for block in model.blocks]
    return 6 * weights + sum(12 * C * (window - window * window / (2 * T)) for window in windows)


def peak_flops(device):
    """Peak FLOP/s of a CUDA device; 0 if the chip is not in the table or the device is no GPU."""
    if torch.device(device).type != "cuda":
        return 0
    name = torch.cuda.get_device_name(device)
    return 1e12 * next((peak for part, peak in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", name)), 0)
