"""What a run tells: progress lines, metrics.jsonl, loss.png, wandb, and the share of the chip's peak it reaches."""

import errno
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from data import atomic_file, spare_path
from say import say

# Dense bf16/fp16 tensor-core peaks from the vendors' data sheets, in TFLOP/s, by a part of the device's name.
PEAK_TFLOPS = {
    "H200": 989, "H100 PCIe": 756, "H100": 989, "H800": 989, "H20": 148, "B200": 2250, "B100": 1800, "GB200": 2500,
    "A100": 312, "A800": 312, "A40": 150, "A30": 165, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181, "L4": 121,
    "V100": 125, "T4": 65, "RTX 6000 Ada": 364, "RTX 5090": 210, "RTX 4090": 165, "RTX 4080": 97, "RTX 3090": 71,
    "RTX 3080": 60,
}  # fmt: skip

DRAW_SECONDS = 30  # from one loss.png to the next: drawing takes as long as a hundred steps of a small network
WANDB_SECONDS = 10  # that the end of a run waits for wandb; the metrics are on disk in any case


def peak_flops(device):
    """Peak FLOP/s of a CUDA device; None if the chip is not in the table or the device is no GPU."""
    if torch.device(device).type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [part for part in PEAK_TFLOPS if re.search(rf"\b{part}\b", name)]
    return PEAK_TFLOPS[max(known, key=len)] * 1e12 if known else None


def describe(config, model, corpus, distributed, dtype, folder, micro_batch):
    """The first lines of a run: what trains where, on what."""
    device, network = distributed.device, model.config
    chip = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{torch.get_num_threads()} threads"
    parameters = sum(p.numel() for p in model.parameters())
    say(f"run        {folder} (process {os.getpid()})")
    say(f"device     {device} ({chip}) x {distributed.world}, {str(dtype).removeprefix('torch.')}")
    say(
        f"model      {parameters:,} parameters: {network.n_layer} layers, {network.n_head} heads"
        f" ({network.kv_heads} kv), width {network.n_embd}, context {network.block_size}"
    )
    say(
        f"data       {corpus.source}: {len(corpus.train):,} training and {len(corpus.val):,} validation tokens,"
        f" tokenizer {corpus.tokenizer.name} of {corpus.tokenizer.n_vocab:,}"
    )
    tokens = config.batch_size * config.block_size
    epochs = config.steps * tokens / len(corpus.train)
    sequences = f"{config.batch_size:,} sequences, {micro_batch:,} at a time"
    say(f"step       {tokens:,} tokens ({sequences}), {config.steps:,} steps = {epochs:.1f} epochs")


def age():
    """Seconds since this process was started; 0.0 where there is no /proc to tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


class Laps:
    """The parts of a start and the seconds each took: `seconds`, a dict in their order."""

    def __init__(self, **seconds):
        self.seconds, self.since = seconds, time.perf_counter()

    def end(self, name):
        """What was done since the last part ended was the part `name`."""
        now = time.perf_counter()
        self.seconds[name], self.since = now - self.since, now


class Report:
    """Writes a run's records; on ranks other than the first it keeps silent.

    A disk that is full costs a warning; the records wait in memory until there is room.

    Args:
        folder: the run folder. config: the run's Config. bits_per_nat: bits per byte of one nat per token.
        flops_per_step, peak: of all devices together; peak may be None. start: first step of this process.
    """

    def __init__(self, folder, config, *, bits_per_nat, flops_per_step, peak, start, enabled=True):
        self.folder, self.config, self.enabled = folder, config, enabled
        self.bits_per_nat, self.flops_per_step, self.peak = bits_per_nat, flops_per_step, peak
        self.started = self.last_time = time.perf_counter()
        self.last_step = self.first_step = start
        self.paused, self.drawn, self.drawable = 0.0, self.started, True
        self.started_in = {}
        self.waiting, self.mirror = b"", None
        if not enabled:
            return
        records, damaged = _read_metrics(folder)
        if damaged:
            _keep_damaged(folder / "metrics.jsonl", damaged)
        # what was recorded past the checkpoint is about to happen again
        kept = [record for record in records if record["step"] <= start]
        with atomic_file(folder / "metrics.jsonl") as file:
            file.write("".join(json.dumps(record) + "\n" for record in kept).encode())
        if config.wandb != "off":  # a session of its own, so that Ctrl-C is not its end too
            command = [sys.executable, str(Path(__file__).with_name("mirror.py")), str(folder)]
            try:
                self.mirror = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            except OSError as error:
                later = f"python mirror.py {folder} sends its metrics later"
                say(f"wandb: {error.strerror}; the training goes on, and {later}", sys.stderr)

    def start(self, seconds):
        """Say where the time until the end of the first step went, by part; the next step's record holds it too."""
        self.started_in = {name: round(part, 3) for name, part in seconds.items()}
        if self.enabled:
            parts = ", ".join(f"{part:.1f} s {name}" for name, part in seconds.items())
            say(f"start      {sum(seconds.values()):.1f} s: {parts}")

    def step(self, step, learning_rate, loss, grad_norm, skipped):
        """Record a training step; loss in nats per token, `skipped` counts all steps that the guard did not take.

        Call it when the device is in step with the host.
        """
        if not self.enabled:
            return
        now = time.perf_counter()
        seconds = max(now - self.last_time - self.paused, 1e-9) / max(step - self.last_step, 1)
        self.last_time, self.last_step, self.paused = now, step, 0.0
        config = self.config
        record = {
            "step": step,
            "loss": loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "skipped_steps": int(skipped),
            "tokens_per_second": config.batch_size * config.block_size / seconds,
            "tflops": self.flops_per_step / seconds / 1e12,
        }
        if self.peak:
            record["mfu"] = self.flops_per_step / seconds / self.peak
        if self.started_in:
            record["start_seconds"], self.started_in = self.started_in, {}
        self._write(record)
        speed = f"MFU {record['mfu']:.1%}" if self.peak else f"{record['tflops']:.3g} TFLOP/s"
        left = (config.steps - step) * (now - self.started) / max(step - self.first_step, 1)
        say(
            f"step {step}/{config.steps}  loss {loss:.4f}  lr {learning_rate:.2e}  "
            f"{record['tokens_per_second']:,.0f} tokens/s  {speed}  {_clock(left)} left"
            + (f"  {skipped:.0f} skipped" if skipped else ""),
            renew=True,
        )

    def evaluation(self, step, loss, is_best, attention_lse=None):
        """Record the validation loss (nats per token), and redraw loss.png if it is due.

        attention_lse: [n_layer] floats, the largest log-sum-exp of each layer's attention; None does without.
        """
        if not self.enabled:
            return
        bits = loss * self.bits_per_nat
        record = {"step": step, "val_loss": loss, "val_bpb": bits}
        if attention_lse is not None:
            record["attention_lse"] = attention_lse
            say("attention  largest log-sum-exp by layer: " + " ".join(f"{lse:.1f}" for lse in attention_lse))
        self._write(record)
        mark = "  (best)" if is_best else ""
        say(f"step {step}/{self.config.steps}  val loss {loss:.4f} nats/token  {bits:.4f} bits/byte{mark}")
        if time.perf_counter() - self.drawn > DRAW_SECONDS:
            self._draw()

    def pause(self, since):
        """Leave the time since `since` (perf_counter seconds), spent evaluating or saving, out of the tokens/s."""
        self.paused += time.perf_counter() - since

    def close(self, *lines):
        """Say the last lines, first because torchrun kills a stopping rank after 30 s; draw, and wait for wandb."""
        if not self.enabled:
            return
        for line in ("", *lines):
            say(line)
        self._draw()
        if not self.flush():
            say(f"warning: the last records of {self.folder / 'metrics.jsonl'} could not be written")
        if self.mirror is not None:
            self.mirror.stdin.close()
            try:
                self.mirror.wait(WANDB_SECONDS)
            except subprocess.TimeoutExpired:
                self.mirror.kill()
                say(f"wandb has not taken everything yet; python mirror.py {self.folder} sends it again")

    def _draw(self):
        try:
            plot_losses(self.folder, self.bits_per_nat)
        except Exception as error:  # a full disk, a broken matplotlib, a bug: no picture is worth the run
            if self.drawable:
                reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
                say(
                    f"warning: {self.folder / 'loss.png'} cannot be drawn ({reason[:120]});"
                    " the run goes on, and metrics.jsonl has what it would show"
                )
            self.drawable = False  # said once
        self.drawn = time.perf_counter()

    def flush(self):
        """Bring all records to the disk, before a checkpoint that goes on from here; whether it takes them."""
        try:
            if self.enabled:
                self._append(flush=True)
            return True
        except OSError:
            return False

    def _write(self, record):
        had = bool(self.waiting)
        self.waiting += json.dumps(_json(record)).encode() + b"\n"
        try:
            self._append()
        except OSError as error:
            if not had:
                say(f"warning: {self.folder / 'metrics.jsonl'} cannot be written ({error.strerror}); its records wait")

    def _append(self, flush=False):
        """Append all lines that wait, or nothing: one write, taken back where the disk takes only a part."""
        with open(self.folder / "metrics.jsonl", "ab", buffering=0) as file:
            start = file.tell()
            try:
                if file.write(self.waiting) < len(self.waiting):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if flush:
                    os.fsync(file.fileno())
            except OSError:
                file.truncate(start)
                raise
            self.waiting = b""


def _json(value):
    """What JSON has no word for, NaN and infinity, as None."""
    if isinstance(value, dict):
        return {name: _json(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(folder):
    """The records of metrics.jsonl; lines that hold none are left out."""
    return _read_metrics(folder)[0]


def _read_metrics(folder):
    """(records of metrics.jsonl, numbers of the damaged lines), counted from 1.

    The last line may be cut, if the process was killed in the middle of it: that is no damage.
    """
    path, records, damaged = folder / "metrics.jsonl", [], []
    *lines, last = (path.read_bytes() if path.exists() else b"").split(b"\n")  # a flipped bit may leave no UTF-8
    for number, line in enumerate([*lines, last], 1):
        record = _record(line)
        if record is not None:
            records.append(record)
        elif number <= len(lines):
            damaged.append(number)
    return records, damaged


def _record(line):
    """What a line of metrics.jsonl (bytes) holds, None if that is no JSON object with an integer "step"."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):  # no UTF-8, no JSON, a number of too many digits; brackets without end
        return None
    # not isinstance, for which True is an integer
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _keep_damaged(path, lines):
    """Copy a file with damaged lines, of these numbers, to a name that ends in .damaged, and warn."""
    copy = spare_path(path, ".damaged")
    with atomic_file(copy) as file:  # no rename: a kill before the good records are written again must not lose them
        file.write(path.read_bytes())
    what = f"line {lines[0]}" if len(lines) == 1 else f"{len(lines)} lines, the first of them line {lines[0]},"
    say(
        f"warning: {what} of {path} cannot be read (each must be a JSON object with an integer step);"
        f" the run goes on without, and the file as it was is {copy}",
        sys.stderr,
    )


def plot_losses(folder, bits_per_nat):
    """Draw loss.png from metrics.jsonl: training and validation loss, with bits per byte on the right axis."""
    from matplotlib.figure import Figure  # takes a second, which the start of a run need not wait for

    records = read_metrics(folder)
    # numbers only: None stands for NaN, and a damaged line may still be JSON
    train = [(r["step"], r["loss"]) for r in records if isinstance(r.get("loss"), int | float)]
    val = [(r["step"], r["val_loss"]) for r in records if isinstance(r.get("val_loss"), int | float)]
    if not val:
        return
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis = figure.subplots()
    if train:
        axis.plot(*zip(*train, strict=True), color="#9aa7b5", linewidth=1, label="training")
    best = min(val, key=lambda point: point[1])
    axis.plot(*zip(*val, strict=True), color="#c0392b", linewidth=1.8, marker="o", markersize=3, label="validation")
    axis.axhline(best[1], color="#c0392b", linewidth=0.6, linestyle=":")
    name = folder.name.replace("$", r"\$")  # two of them would make it a formula
    axis.set_title(f"{name}: best {best[1]:.4f} nats/token = {best[1] * bits_per_nat:.3f} bits/byte at {best[0]}")
    axis.set_xlabel("step")
    axis.set_ylabel("loss (nats per token)")
    right = axis.secondary_yaxis("right", functions=(lambda x: x * bits_per_nat, lambda x: x / bits_per_nat))
    right.set_ylabel("bits per byte")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    temporary = folder / "loss.partial.png"
    figure.savefig(temporary, dpi=130)
    temporary.replace(folder / "loss.png")


def _clock(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
