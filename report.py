"""What a run tells: progress lines, metrics.jsonl, loss.png, wandb, and the share of the chip's peak it reaches."""

import contextlib
import json
import re
import sys
import time

import matplotlib
import torch

from data import atomic_file

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Dense bf16/fp16 tensor-core peaks from the vendors' data sheets, in TFLOP/s, by a part of the device's name.
PEAK_TFLOPS = {
    "H200": 989, "H100 PCIe": 756, "H100": 989, "H800": 989, "H20": 148, "B200": 2250, "B100": 1800, "GB200": 2500,
    "A100": 312, "A800": 312, "A40": 150, "A30": 165, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181, "L4": 121,
    "V100": 125, "T4": 65, "RTX 6000 Ada": 364, "RTX 5090": 210, "RTX 4090": 165, "RTX 4080": 97, "RTX 3090": 71,
    "RTX 3080": 60,
}  # fmt: skip


def peak_flops(device):
    """Peak FLOP/s of a CUDA device; None if the chip is not in the table or the device is no GPU."""
    if torch.device(device).type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [part for part in PEAK_TFLOPS if re.search(rf"\b{part}\b", name)]
    return PEAK_TFLOPS[max(known, key=len)] * 1e12 if known else None


class Report:
    """Writes a run's records; on ranks other than the first it keeps silent.

    Args:
        folder: the run folder. config: the run's Config. bits_per_nat: bits per byte of one nat per token.
        flops_per_step, peak: of all devices together; peak may be None. start: first step of this process.
    """

    def __init__(self, folder, config, *, bits_per_nat, flops_per_step, peak, start, enabled=True):
        self.folder, self.config, self.enabled = folder, config, enabled
        self.bits_per_nat, self.flops_per_step, self.peak = bits_per_nat, flops_per_step, peak
        self.started = self.last_time = time.perf_counter()
        self.last_step = self.first_step = start
        self.paused = 0.0
        self.wandb = None
        if enabled and start > 0:  # what was recorded past the checkpoint is about to happen again
            kept = [record for record in read_metrics(folder) if record["step"] <= start]
            with atomic_file(folder / "metrics.jsonl") as file:
                file.write("".join(json.dumps(record) + "\n" for record in kept).encode())
        if enabled and config.wandb != "off":
            try:
                import wandb  # only if asked for: it takes a second to import

                self.wandb = wandb.init(
                    project=config.wandb_project, name=folder.name, mode=config.wandb, dir=folder, config=vars(config)
                )
            except Exception as error:  # its own errors share no base class across versions
                reason = (str(error) or type(error).__name__).splitlines()[0]
                raise ValueError(f"wandb={config.wandb!r} does not start ({reason}); use offline or off") from error

    def step(self, step, loss, learning_rate, grad_norm):
        """Record a training step; loss in nats per token. Call it when the device is in step with the host."""
        now = time.perf_counter()
        seconds = max(now - self.last_time - self.paused, 1e-9) / max(step - self.last_step, 1)
        self.last_time, self.last_step, self.paused = now, step, 0.0
        config = self.config
        record = {
            "step": step,
            "loss": loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "tokens_per_second": config.batch_size * config.block_size / seconds,
            "tflops": self.flops_per_step / seconds / 1e12,
        }
        if self.peak:
            record["mfu"] = self.flops_per_step / seconds / self.peak
        self._write(record)
        speed = f"MFU {record['mfu']:.1%}" if self.peak else f"{record['tflops']:.3g} TFLOP/s"
        left = (config.steps - step) * (now - self.started) / max(step - self.first_step, 1)
        self._progress(
            f"step {step}/{config.steps}  loss {loss:.4f}  lr {learning_rate:.2e}  "
            f"{record['tokens_per_second']:,.0f} tokens/s  {speed}  {_clock(left)} left"
        )

    def evaluation(self, step, loss, is_best):
        """Record the validation loss (nats per token) and redraw loss.png."""
        bits = loss * self.bits_per_nat
        self._write({"step": step, "val_loss": loss, "val_bpb": bits})
        mark = "  (best)" if is_best else ""
        self._line(f"step {step}/{self.config.steps}  val loss {loss:.4f} nats/token  {bits:.4f} bits/byte{mark}")
        if self.enabled:
            plot_losses(self.folder, self.bits_per_nat)

    def pause(self, since):
        """Leave the time since `since` (perf_counter seconds), spent evaluating or saving, out of the tokens/s."""
        self.paused += time.perf_counter() - since

    def close(self):
        self._line("")
        if self.wandb is not None:
            self.wandb.finish()

    def _write(self, record):
        if not self.enabled:
            return
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
        if self.wandb is not None:
            self.wandb.log(record, step=record["step"])

    def _progress(self, text):
        """One line that renews itself on a terminal; a plain line elsewhere."""
        if self.enabled:
            print(
                f"\r\x1b[K{text}" if sys.stdout.isatty() else text,
                end="" if sys.stdout.isatty() else "\n",
                flush=True,
            )

    def _line(self, text):
        if self.enabled:
            print(f"\r\x1b[K{text}" if sys.stdout.isatty() else text, flush=True)


def read_metrics(folder):
    """The records of metrics.jsonl; the last line may be cut, if the process was killed in the middle of it."""
    path, records = folder / "metrics.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def plot_losses(folder, bits_per_nat):
    """Draw loss.png from metrics.jsonl: training and validation loss, with bits per byte on the right axis."""
    records = read_metrics(folder)
    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    val = [(r["step"], r["val_loss"]) for r in records if "val_loss" in r]
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    if train:
        axis.plot(*zip(*train, strict=True), color="#9aa7b5", linewidth=1, label="training")
    best = min(val, key=lambda point: point[1])
    axis.plot(*zip(*val, strict=True), color="#c0392b", linewidth=1.8, marker="o", markersize=3, label="validation")
    axis.axhline(best[1], color="#c0392b", linewidth=0.6, linestyle=":")
    axis.set_title(
        f"{folder.name}: best {best[1]:.4f} nats/token = {best[1] * bits_per_nat:.3f} bits/byte at {best[0]}"
    )
    axis.set_xlabel("step")
    axis.set_ylabel("loss (nats per token)")
    right = axis.secondary_yaxis("right", functions=(lambda x: x * bits_per_nat, lambda x: x / bits_per_nat))
    right.set_ylabel("bits per byte")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    temporary = folder / "loss.partial.png"
    figure.savefig(temporary, dpi=130)
    plt.close(figure)
    temporary.replace(folder / "loss.png")


def _clock(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
