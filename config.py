"""Config: every knob of a run, typed and documented; load_config reads defaults < config file < flags."""

import contextlib
import difflib
import io
import math
import os
import runpy
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import torch
import typeguard
import tyro

from checkpoint import newest_run, read_config
from model import GPTConfig
from say import say

# What may change when a run is resumed: it then still equals a run in one piece. Where a text comes from may, because
# restore() compares its tokens.
FREE_ON_RESUME = (
    "resume", "allow_changes", "name", "data", "input", "keep", "max_bad_steps", "log_every", "log_attention", "wandb",
    "wandb_project", "shard_optimizer",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(GPTConfig):
    """A training run. Numbers that follow from others are properties; nothing is assigned after the start."""

    # data
    data: Literal["shakespeare", "text"] = "shakespeare"
    """Corpus: tiny Shakespeare, or a text of yours named by --input."""
    input: str = ""
    """Text file or folder for --data text (or a local copy of tiny Shakespeare)."""
    tokenizer: str = "char"
    """bytes, char, bpe:N (trained on the corpus), gpt2, or gpt2:RANK_FILE."""

    # run
    name: str = "run"
    """The run's folder is runs/NAME, or runs/NAME-2 and so on if that exists."""
    resume: str = ""
    """Folder of a run to go on with; --resume alone takes the newest."""
    allow_changes: bool = False
    """With --resume: allow other options, or data, than the run has; it then equals no run in one piece."""
    keep: int = 2
    """Checkpoints to keep, besides best.pt."""
    seed: int = 1337
    deterministic: bool = False
    """The same bits from the same seed on a GPU too, by slower kernels; a CPU gives them anyway."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU), cpu, cuda, cuda:1, mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of matmuls; auto is bfloat16 on GPUs that have it, float16 with a gradient scaler on older ones, else float32."""
    compile: Literal["model", "blocks", "off"] = "model"
    """torch.compile on CUDA: the whole model, or its blocks, which all share one compilation: slower by a few percent,
    and started sooner."""
    cuda_graph: bool = True
    """On one CUDA GPU, replay steps of one micro-batch as a CUDA graph."""

    # batches
    batch_size: int = 64
    """Sequences per step, over all GPUs and micro-batches."""
    micro_batch: int | Literal["auto"] = 0
    """Sequences per forward pass of one GPU. 0 takes all of its share at once, or with --resume and dropout as many as
    before; auto the most that fit its memory and divide its share (on a CPU up to 32), with --resume as many as before.
    """

    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonal steps for the matrices of the blocks, AdamW's for the rest."""
    muon_scale: float = 1.0
    """Learning rate of the blocks' matrices with muon, as a multiple of learning_rate; try up to 2."""
    muon_momentum: float = 0.95
    shard_optimizer: bool = False
    """Of several GPUs, let each hold its share of the optimizer's state, for models that otherwise do not fit."""
    steps: int = 5000
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup_steps: int = 100
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: cosine decay, or warm-up/stable/decay, linear over the last decay_fraction of the steps."""
    decay_fraction: float = 0.3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0 = no clipping."""
    skip_zscore: float = 0.0
    """Skip steps whose loss or gradient norm is so many standard deviations above the mean of 128 steps; 0 = none."""
    max_bad_steps: int = 20
    """Stop after so many steps in a row without a finite loss and gradient, at the next log or evaluation; each is
    skipped."""

    # reports
    eval_every: int = 250
    """Steps between evaluations, each of which saves a checkpoint; loss.png is drawn now and then, and at the end."""
    eval_batches: int = 50
    """Most batches of batch_size per evaluation, spread evenly over the validation text; 0 takes all of it."""
    log_every: int = 10
    log_attention: bool = False
    """At each evaluation, the largest log-sum-exp of each layer's attention: its largest logit, at most ln(T) over."""
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "gpt"

    def __post_init__(self):
        for name, kind in get_type_hints(type(self)).items():
            _check_type(name, getattr(self, name), kind)
        check_finite(self)
        super().__post_init__()
        for name in ("batch_size", "steps", "eval_every", "log_every", "keep", "max_bad_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in (
            "micro_batch",
            "warmup_steps",
            "eval_batches",
            "weight_decay",
            "grad_clip",
            "skip_zscore",
            "min_learning_rate",
        ):
            if getattr(self, name) != "auto" and getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.learning_rate <= 0 or self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"learning_rate={self.learning_rate} must be positive and at least "
                f"min_learning_rate={self.min_learning_rate}"
            )
        if self.muon_scale <= 0:
            raise ValueError(f"muon_scale={self.muon_scale} must be positive")
        if not 0 <= self.muon_momentum < 1:
            raise ValueError(f"muon_momentum={self.muon_momentum} must be in [0, 1)")
        if not 0 <= self.decay_fraction <= 1:
            raise ValueError(f"decay_fraction={self.decay_fraction} must be in [0, 1]")
        if self.data == "text" and not self.input:
            raise ValueError("data='text' needs --input FILE, a text file or folder of yours")
        if not self.name or Path(self.name).name != self.name or self.name.startswith("."):
            raise ValueError(f"name={self.name!r} must be one folder name, such as 'baseline'")

    def model(self, vocab_size):
        """The network's part of the configuration, for a tokenizer of `vocab_size` tokens."""
        if 0 < self.vocab_size < vocab_size:
            raise ValueError(
                f"vocab_size={self.vocab_size} is smaller than the tokenizer's {vocab_size}; 0 takes the tokenizer's"
            )
        values = {field.name: getattr(self, field.name) for field in fields(GPTConfig)}
        return GPTConfig(**values | {"vocab_size": self.vocab_size or vocab_size})


def load_config(argv):
    """Config from the command line `[configs/NAME.py] [--flag value ...]`; errors are ValueErrors of one sentence.

    A config file holds assignments only. Its dictionary `cpu`, if any, replaces values on a machine without a GPU.
    With --resume [RUN] the run's own configuration takes the file's place, and flags that would make the resumed run
    another one need --allow_changes True.
    """
    argv = [part for flag in argv for part in (flag.split("=", 1) if flag.startswith("--resume=") else (flag,))]
    settings, cpu = {}, {}
    if "--resume" in argv:
        after = argv.index("--resume") + 1
        if after == len(argv) or argv[after].startswith("--"):
            argv.insert(after, str(newest_run("config.json")))  # which may have ended before its first checkpoint
        if not argv[0].startswith("-"):
            raise ValueError(f"--resume takes the configuration of {argv[after]}; leave out {argv[0]}")
        settings = dict(read_config(Path(argv[after]), quiet=True).options)
        settings.pop("allow_changes", None)  # holds for one resumption only
    elif argv and not argv[0].startswith("-"):
        path = Path(argv.pop(0))
        settings = {"name": path.stem} | _run_file(path)
        cpu = settings.pop("cpu", {})
        if not isinstance(cpu, dict):
            raise ValueError(f"cpu={cpu!r} in {path} must be a dict of options, such as dict(n_layer=4)")
        if "resume" in settings | cpu:
            raise ValueError(f"resume cannot be set in {path}; give it as the flag --resume")
    for name in settings | cpu:
        _check_name(name, Config)
    flags = read_flags(Config, argv)
    if "resume" in flags and not flags.get("allow_changes"):
        defaults = {field.name: field.default for field in fields(Config)}
        for name, value in flags.items():
            before = settings.get(name, defaults[name])
            if value != before and name not in FREE_ON_RESUME:
                raise ValueError(
                    f"--{name} {value} would make {flags['resume']} another run: it now has {before}; "
                    "leave the flag out, or add --allow_changes True"
                )
    device = flags.get("device", settings.get("device", "auto"))
    on_cpu = cpu and isinstance(device, str) and resolve_device(device) == "cpu"
    return Config(**settings | (cpu if on_cpu else {}) | flags)


def read_flags(kind, argv):
    """Values of `--name value` or `--name=value` flags for the fields of the dataclass `kind`, by name."""
    kinds = get_type_hints(kind)
    if "--help" in argv or "-h" in argv:
        tyro.cli(kind, args=["--help"], use_underscores=True)
    values, rest = {}, list(argv)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--"):
            raise ValueError(f"{flag!r} is not an option; write --name value")
        _check_name(name, kind, "--")
        if not equals and not rest:
            raise ValueError(f"--{name} needs a value; it must be {_words(kinds[name])}")
        values[name] = _convert(name, text if equals else rest.pop(0), kinds[name])
    return values


def check_finite(config):
    """ValueError if a float of a dataclass is NaN or infinite, or its seed is not one that torch takes."""
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{field.name}={value} must be finite; give a number")
    if not 0 <= config.seed < 2**63:
        raise ValueError(f"seed={config.seed} must be from 0 to 2^63 - 1")


def resolve_device(device):
    """The device that `auto` stands for; ValueError if the one asked for is absent."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not (kind == "cuda" and index.isdecimal())):
        raise ValueError(f"device={device!r} is unknown; choose auto, cpu, cuda, cuda:N or mps")
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[kind]
    if int(index or 0) >= count:
        raise ValueError(f"device={device!r} is not available: {count} such devices are here; use --device cpu or auto")
    return device


def resolve_dtype(dtype, device):
    """The torch dtype of matmuls that a name stands for; auto depends on the device."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if not device.startswith("cuda"):
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def _run_file(path):
    if not path.is_file():
        known = ", ".join(str(p) for p in sorted(Path("configs").glob("*.py")))
        raise ValueError(f"config file {path} does not exist; there are {known or 'none here'}")
    try:
        settings = runpy.run_path(str(path))
    except Exception as error:  # it is a program: anything may come of it
        raise ValueError(f"config file {path} does not run: {type(error).__name__}: {error}") from error
    return {name: value for name, value in settings.items() if not name.startswith("_")}


def _check_name(name, kind, prefix=""):
    known = [field.name for field in fields(kind)]
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {prefix}{close[0]}?" if close else "--help lists all"
        raise ValueError(f"unknown option {prefix}{name}; {hint}")


def _convert(name, text, kind):
    """The value that a flag's text stands for."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return tyro.cli(kind, args=["--", text], config=(tyro.conf.FlagConversionOff,))
    except SystemExit:
        raise ValueError(f"--{name} {text!r} has the wrong type; it must be {_words(kind)}") from None


def _check_type(name, value, kind):
    try:
        typeguard.check_type(value, kind)
        right = kind is bool or not isinstance(value, bool)  # a bool is an int to Python, not to us
    except typeguard.TypeCheckError:
        right = False
    if not right:
        raise ValueError(f"{name}={value!r} has the wrong type; it must be {_words(kind)}")


def _words(kind):
    """A type as users read it: int, float or None, one of 'a', 'b'."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if get_args(kind):
        return " or ".join(_words(part) for part in get_args(kind))
    return "None" if kind is type(None) else kind.__name__


def fail(error):
    """End the program with one sentence on standard error and exit code 1.

    Before ranks have met, those of a machine fail alike and the first speaks for them; afterwards each for itself.
    """
    rank = os.environ.get("RANK", "0")
    if os.environ.get("LOCAL_RANK", "0") == "0" or torch.distributed.is_initialized():
        say(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", sys.stderr)
    sys.exit(1)
