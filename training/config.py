"""Config: every option of a run, typed and documented. load_config() reads defaults < config file < flags."""

import argparse
import json
import runpy
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import torch
import tyro

from data import end_of_text
from model import GPTConfig, require
from training.checkpoint import checkpoints, known_options, newest_run

# Options that may change when a run is resumed. For `data` and `input`, the tokens are compared instead.
FREE_ON_RESUME = {
    "resume", "allow_changes", "data", "input", "verify", "keep", "max_bad_steps", "log_every", "sample_every", "wandb",
    "save_every", "parallel", "cpu_offload", "checkpoint_activations",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(GPTConfig):
    """Options of a training run: python train.py [configs/NAME.py] [--option value ...]"""

    # data
    data: Literal["shakespeare", "text", "fineweb-edu", "openwebtext", "tokens"] = "shakespeare"
    """Corpus: tiny Shakespeare, text or tokens of yours with --input, or a data set that `python -m data.prepare` has
    prepared."""
    input: str = ""
    """File or folder for --data text (or a local copy of tiny Shakespeare); folder for --data tokens."""
    tokenizer: str = "char"
    """bytes, char, bpe:N (trained on the corpus), gpt2, gpt2:RANK_FILE, or run:PATH (the tokenizer of a run)."""
    verify: bool = False
    """Read all tokens before training and compare their sha256 with the corpus's manifest."""

    init_from: str = ""
    """Weights to begin with: gpt2, gpt2-medium, gpt2-large, gpt2-xl, a Hugging Face folder or its .safetensors file, a
    run folder or a checkpoint file. They determine the network and the tokenizer; block_size may be smaller."""

    # batches
    batch_size: int = 64
    """Sequences per step, over all GPUs and micro-batches."""
    micro_batch: int | Literal["auto"] = 0
    """Sequences per forward pass of one GPU: 0 takes the GPU's whole share of a batch, auto as many as fit into memory.
    """

    # optimizer
    steps: int = 5000
    """Updates of the weights."""
    learning_rate: float = 1e-3
    """Highest learning rate, after the warm-up."""
    min_learning_rate: float = 1e-4
    """Learning rate at the end."""
    warmup_steps: int = 100
    """Steps over which the learning rate rises from 0."""
    cooldown: float = 0.0
    """0: cosine decay after the warm-up. Above 0: constant, then linear decay over this last share of the steps."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalised steps for the matrices of the blocks, AdamW for the rest."""
    muon_scale: float = 1.0
    """With muon, the learning rate of the blocks' matrices, as a multiple of learning_rate; try up to 2."""
    embed_scale: float = 1.0
    """Learning rate of embeddings and a tied head, and so their weight decay, as a multiple of learning_rate."""
    weight_decay: float = 0.1
    """Weight decay of matrices and embeddings; norms and biases have none."""
    beta2: float = 0.99
    """AdamW's decay of the squared gradients' average; beta1 is 0.9."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0 = no clipping."""
    ema: float = 0.0
    """Decay per step of a running average of the weights, such as 0.98. Validation, samples and best.pt use
    the average; it helps networks that overfit. 0 = off."""
    max_bad_steps: int = 20
    """A step whose loss or gradient is not finite is skipped; the run ends after this many in a row."""

    # run
    name: str = "run"
    """The run's folder is runs/NAME, or runs/NAME-2 and so on if that exists."""
    resume: str = ""
    """Resume the run in this folder; --resume alone takes the newest."""
    allow_changes: bool = False
    """With --resume: accept other options or data than before; the result will differ from an uninterrupted run."""
    keep: int = 2
    """Number of checkpoints to keep, besides best.pt."""
    seed: int = 1337
    deterministic: bool = False
    """Make a GPU return the same bits for the same seed, with slower kernels; a CPU does so anyway."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU), cpu, cuda, cuda:1, mps. With torchrun each rank takes a GPU of its own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of matmuls. auto: bfloat16 on GPUs that have it, float16 with a gradient scaler on older ones, float32 on
    other devices."""
    fp8: bool = False
    """Multiply in FP8 in the forward pass of training: the head, the MLPs, and q, k and v. It needs a GPU of compute
    capability 8.9 or higher, and pays for networks of GPT-2's size or larger. Evaluation does not use it."""
    compile: Literal["auto", "model", "blocks", "off"] = "auto"
    """torch.compile the whole model, or only its blocks, which share one compilation: this starts sooner and runs a few
    percent slower. auto: model on CUDA, off elsewhere."""
    cuda_graph: bool = True
    """Replay the step as a CUDA graph, on CUDA GPUs with one micro-batch per step and without FSDP."""

    # memory
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """With torchrun: ddp keeps the whole network on each GPU, fsdp spreads weights, gradients and moments over the
    GPUs. auto: fsdp if these do not fit on one GPU."""
    cpu_offload: bool = False
    """With --parallel fsdp: keep weights, gradients and moments in host memory."""
    checkpoint_activations: Literal["off", "selective", "blocks"] = "off"
    """Recompute activations in the backward pass. blocks: keep only the inputs of the blocks. selective: keep also the
    results of matmuls and attention."""

    # reports
    eval_every: int = 250
    """Steps between evaluations."""
    save_every: int = 0
    """Steps between checkpoints; 0 takes eval_every."""
    eval_batches: int = 50
    """Batches of batch_size per evaluation, spread evenly over the validation text; 0 takes all of it."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    sample_every: int = 0
    """Steps between samples of about a hundred tokens, which are printed and logged to wandb; 0 = none."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Log to Weights & Biases as well; WANDB_PROJECT names the project."""

    def __post_init__(self):
        super().__post_init__()
        at_least_1 = ("batch_size", "steps", "eval_every", "log_every", "keep", "max_bad_steps")
        at_least_0 = (
            "micro_batch",
            "warmup_steps",
            "eval_batches",
            "save_every",
            "sample_every",
            "weight_decay",
            "grad_clip",
            "min_learning_rate",
            "seed",
        )
        for name in at_least_1 + at_least_0:
            value, least = getattr(self, name), int(name in at_least_1)
            require(value == "auto" or value >= least, f"{name}={value} must be at least {least}")
        ordered = 0 < self.learning_rate >= self.min_learning_rate
        require(
            ordered,
            f"learning_rate={self.learning_rate} must be above 0 and min_learning_rate={self.min_learning_rate}",
        )
        for name in ("muon_scale", "embed_scale"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive")
        with_fsdp = self.parallel == "fsdp" or not self.cpu_offload
        require(with_fsdp, "cpu_offload=True needs --parallel fsdp, under torchrun")
        require(0 <= self.cooldown <= 1, f"cooldown={self.cooldown} must be in [0, 1], a share of the steps")
        require(0 <= self.ema < 1, f"ema={self.ema} must be at least 0 and below 1, such as 0.99")
        with_input = self.data not in ("text", "tokens") or self.input
        require(with_input, f"data={self.data!r} needs --input PATH, a file or folder of yours")
        one_folder = Path(self.name).name == self.name and not self.name.startswith(".")
        require(self.name and one_folder, f"name={self.name!r} must be one folder name, such as 'baseline'")

    def model(self, tokenizer):
        """GPTConfig of the network, for a tokenizer."""
        count, end = tokenizer.n_vocab, end_of_text(tokenizer) if self.end_of_text is None else self.end_of_text
        enough = self.vocab_size == 0 or self.vocab_size >= count
        remedy = f"leave it out and give --tokenizer run:{self.init_from}" if self.init_from else "0 takes that"
        require(enough, f"vocab_size={self.vocab_size} is smaller than the tokenizer's {count}; {remedy}")
        hint = f"mask_documents needs an end-of-text token, which the tokenizer {tokenizer.name} of this corpus lacks"
        require(end is not None or not self.mask_documents, f"{hint}; see --tokenizer, or leave mask_documents out")
        values = {field.name: getattr(self, field.name) for field in fields(GPTConfig)}
        return GPTConfig(**values | {"vocab_size": self.vocab_size or count, "end_of_text": end})


def load_config(argv):
    """Config from the command line `[configs/NAME.py] [--flag value ...]`.

    A config file holds only assignments, which flags override. Its dictionary `cpu`, if any, replaces values on a
    machine without a GPU. With --resume [FOLDER] the run's config.json takes the file's place, and a flag that would
    change the result needs --allow_changes.

    Raises:
        ValueError: one sentence that says what to do.
        SystemExit: tyro has printed what is wrong with a flag, or --help.
    """
    argv = list(argv)
    settings = read_config_file(Path(argv.pop(0))) if argv and not argv[0].startswith("-") else {}
    cpu = settings.pop("cpu", {})
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # these flags decide what the others mean
    early.add_argument("--resume", nargs="?", const="newest")
    early.add_argument("--device", default=settings.get("device"))
    early.add_argument("--init_from", "--init-from")
    known, flags = early.parse_known_args(argv)
    flags += [] if known.device is None else [f"--device={known.device}"]
    if known.resume is not None:
        require(known.init_from is None, "--resume goes on with the weights of the run; leave out --init_from")
        require(not settings, "--resume takes the options of the run; leave out the config file")
        return resumed_config(newest_run("config.json") if known.resume == "newest" else Path(known.resume), flags)
    if cpu and resolve_device(known.device or "auto") == "cpu":
        settings |= cpu
    if known.init_from is not None:
        settings["init_from"] = known.init_from
    if settings.get("init_from"):
        from training.weights import network_options  # not at the top, because it imports this module

        settings = network_options(settings["init_from"]) | settings
    return parse_flags(Config, [*to_flags(settings), *flags])


def resumed_config(folder, flags):
    """Config of the run in a folder, changed by flags; ValueError if the changes need --allow_changes."""
    require(folder.is_dir(), f"{folder} does not exist; --resume needs a run's folder")
    record = known_options(json.loads((folder / "config.json").read_text()), Config)
    record |= {"resume": str(folder), "allow_changes": False}  # changes are allowed only once
    if record.get("tokenizer", "").startswith("run:") and checkpoints(folder):
        record["tokenizer"] = f"run:{folder}"  # the same tokenizer; its own run may be gone
    before, config = parse_flags(Config, to_flags(record)), parse_flags(Config, [*to_flags(record), *flags])
    for name, value in asdict(config).items():
        require(
            value == getattr(before, name) or name in FREE_ON_RESUME or config.allow_changes,
            f"{folder} has {name}={getattr(before, name)}; leave out --{name} {value}, or add --allow_changes",
        )
    return config


def read_config_file(path):
    """The assignments of a config file, by name."""
    require(path.is_file(), f"config file {path} does not exist; configs/ has some")
    settings = {name: value for name, value in runpy.run_path(str(path)).items() if not name.startswith("_")}
    allowed = isinstance(settings.get("cpu", {}), dict) and "resume" not in settings
    require(allowed, f"in {path}, cpu must be a dict of options, and resume cannot be set: it is a flag")
    return {"name": path.stem} | settings


def to_flags(settings):
    return [f"--{name}={value}" for name, value in settings.items()]


def parse_flags(kind, argv):
    """An instance of the dataclass `kind` from `--name value` flags; of a repeated flag the last one counts.

    A flag of a boolean option may stand alone and then means True.
    """
    switches = {f"--{field.name}" for field in fields(kind) if field.type is bool}
    argv = list(argv)
    for index in reversed(range(len(argv))):
        if argv[index] in switches and (index + 1 == len(argv) or argv[index + 1].startswith("--")):
            argv.insert(index + 1, "True")
    return tyro.cli(kind, args=argv, config=(tyro.conf.FlagConversionOff,), use_underscores=True)


def resolve_device(device):
    """The device that `auto` stands for; ValueError if the device is not there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind, _, index = device.partition(":")
    known = kind in ("cpu", "mps", "cuda") and (index == "" or (kind == "cuda" and index.isdecimal()))
    require(known, f"device={device!r} is unknown; choose auto, cpu, cuda, cuda:N or mps")
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[kind]
    require(int(index or 0) < count, f"device={device!r} is not available; use --device cpu or auto")
    return device


def resolve_dtype(dtype, device):
    """The torch.dtype of matmuls that an option stands for; auto depends on the device."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if not device.startswith("cuda"):
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
