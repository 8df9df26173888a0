"""Config: every option of a run, typed and documented. load_config() reads defaults < config file < flags."""

import argparse
import math
import runpy
import sys
from dataclasses import asdict, dataclass, fields, replace
from inspect import signature
from pathlib import Path, PurePath
from types import ModuleType
from typing import Literal, get_args, get_origin

import numpy as np

from data.build import Options
from data.files import GPT2_SIZES, RUNS, find_run, read_json
from data.loader import Batches
from data.sources import OWN
from data.tokenizer import end_of_text
from device import resolve_device
from errors import UserError, fold, perhaps, require
from flags import in_words, parse_flags, refuse_nanogpt
from model import GPTConfig
from training.curves import NO_EFFECT, read_options
from weights import checkpoints, load_checkpoint, network_options

CONFIGS = Path(__file__).parents[1] / "configs"
# In place of a network that would take days without a GPU, unless its config file has a dictionary `cpu`.
TOY = dict(
    n_layer=4, n_head=4, n_embd=128, block_size=128, batch_size=8, micro_batch=0, steps=300, warmup_steps=30,
    eval_every=100, eval_batches=20,
)  # fmt: skip
TOO_WIDE = 768  # for a CPU: the least n_embd of such a network
FIXED_ON_RESUME = ("name", "depth", "tokens")  # what follows from them is decided when a run begins
# Numbers by what they must be at least.
AT_LEAST_1 = {
    "batch_size", "steps", "eval_every", "log_every", "keep", "max_bad_steps", "window", "block_size", "n_layer",
    "n_head", "n_kv_head", "n_embd",
}  # fmt: skip
AT_LEAST_0 = {
    "micro_batch", "warmup_steps", "eval_batches", "save_every", "sample_every", "min_learning_rate", "seed", "epochs",
    "tokens", "depth", "weight_decay", "grad_clip", "norm_eps", "vocab_size",
}  # fmt: skip
ABOVE_0 = {"learning_rate", "muon_scale", "rope_theta"}
SHARES = {"dropout", "ema", "beta2"}


@dataclass(frozen=True, kw_only=True)
class Config(GPTConfig):
    """python train.py [CONFIG.py] [--option value ...]

    CONFIG.py: one of the files in configs/, or one of your own with lines such as n_layer = 12
    """

    # one number for all
    depth: int = 0
    """Number of blocks. In configs/modern.py width, heads, batch, rates and steps follow from it, unless given."""
    tokens: int = 0
    """With --depth, tokens to train on; 0 takes 10 for each weight of the blocks and the head."""

    # data
    data: Literal["shakespeare", "text", "chat", "fineweb-edu", "openwebtext", "tokens"] = "shakespeare"
    """Corpus: tiny Shakespeare; your own text, conversations (chat) or tokens, which --input names; or a data set that
    `python -m data.prepare` has prepared."""
    input: str = ""
    """A file or folder of yours, or hub:OWNER/NAME if that is prepared. It is a text unless --data, or a config file,
    is chat or tokens."""
    tokenizer: str = "char"
    """bytes, char, bpe:N (trained on the corpus), gpt2, gpt2:RANK_FILE, or run:PATH (the tokenizer of a run or model).
    bytes+eot and char+eot have an end-of-text token."""
    verify: bool = False
    """Read all tokens before training and compare their sha256 with the corpus's manifest."""

    init_from: str = ""
    """Weights to begin with, named as for sample.py: gpt2 (OpenAI's), a run, a checkpoint file, a Hugging Face folder.
    Network and tokenizer are those of the weights; block_size may be smaller."""

    # batches
    batch_size: int = 64
    """Sequences per step, over all GPUs and micro-batches."""
    micro_batch: int | Literal["auto"] = 0
    """Sequences per forward pass of one GPU: 0 takes its whole share of a batch, auto as many as fit into memory."""

    # optimizer
    steps: int = 5000
    """Updates of the weights."""
    epochs: float = 0.0
    """Passes over the training text, from which the steps follow; 0 takes --steps."""
    learning_rate: float = 1e-3
    """Highest learning rate, after the warm-up."""
    min_learning_rate: float = 1e-4
    """Learning rate at the end."""
    warmup_steps: int = 100
    """Steps over which the learning rate rises."""
    cooldown: float = 0.0
    """0: cosine decay after the warm-up. Above 0: constant, then linear decay over this last share of the steps."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalised steps for the matrices of the blocks, AdamW for the rest."""
    muon_scale: float = 1.0
    """With muon, the learning rate of the blocks' matrices, as a multiple of learning_rate; configs/ has 0.5 to 4."""
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
    """The run's folder is runs/NAME, or runs/NAME-2 and so on if that exists. gpt2 is the name of OpenAI's model."""
    runs: str = str(RUNS)
    """Folder in place of runs/. The variable GPT_RUNS moves it for all commands."""
    resume: str = ""
    """Resume this run, given as its folder or NAME; --resume alone takes the newest that is not finished."""
    allow_changes: bool = False
    """With --resume: accept other options or data than before; the result will differ from an uninterrupted run."""
    keep: int = 2
    """Number of checkpoints to keep, besides best.pt."""
    seed: int = 1337
    deterministic: bool = False
    """Same seed, same bits on a GPU too, with slower kernels."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU), cpu, cuda, cuda:1, mps. With torchrun each rank takes a GPU of its own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of matmuls. auto: bfloat16 on GPUs that have it, float16 with a gradient scaler on older ones, float32 on
    other devices."""
    fp8: bool = False
    """Multiply in FP8 in the forward pass of training: the head, the MLPs, and q, k and v. It needs a GPU of compute
    capability 8.9 or higher, and saves time if the network is as large as GPT-2. Evaluation does not use it."""
    compile: Literal["auto", "model", "blocks", "off"] = "auto"
    """torch.compile the whole model, or its blocks, which share one compilation, and last norm: this starts sooner and
    runs a few percent slower. auto: model on CUDA, off elsewhere."""
    cuda_graph: bool = True
    """Replay the step as a CUDA graph, on CUDA GPUs with one micro-batch per step and without FSDP."""

    # memory
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With torchrun: ddp keeps the whole network on each GPU; fsdp spreads weights, gradients and moments over the
    GPUs, which takes less memory."""
    checkpoint_activations: Literal["off", "selective", "blocks"] = "off"
    """Recompute activations in the backward pass. blocks: keep only the inputs of the blocks. selective: keep also the
    results of matmuls and attention."""

    # reports
    eval_every: int = 250
    """Steps between evaluations."""
    save_every: int = 0
    """Steps between checkpoints; 0 takes eval_every."""
    eval_batches: int = 50
    """Batches of batch_size in an evaluation, spread evenly over the validation text; 0 takes all of it."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl and of the terminal."""
    sample_every: int = 0
    """Steps between samples of about a hundred tokens, which are printed; 0 = none."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Log to Weights & Biases as well; WANDB_PROJECT names the project."""

    dial = None  # with a config file that has one: a function of the Corpus, which returns this Config completed

    def __post_init__(self):
        """Nothing: load_config() checks a Config when all of its options are known."""

    def check(self):
        """Return this Config; UserError if an option has a value that it cannot have."""
        for name, value in vars(self).items():
            require(not isinstance(value, float) or math.isfinite(value), f"{name}={value} must be a finite number")
            if value is None or isinstance(value, str):
                continue
            if name in AT_LEAST_1 or name in AT_LEAST_0:
                least = int(name in AT_LEAST_1)
                require(value >= least, f"{name}={value} must be at least {least}")
            if name in ABOVE_0:
                require(value > 0, f"{name}={value} must be above 0")
            if name in SHARES:
                require(0 <= value < 1, f"{name}={value} must be at least 0 and below 1")
        super().__post_init__()
        rate, least = self.learning_rate, self.min_learning_rate
        rule = f"learning_rate={rate} must be at least min_learning_rate={least}"
        require(rate >= least, f"{rule}; give both, such as --min_learning_rate {rate / 10:g}")
        require(0 <= self.cooldown <= 1, f"cooldown={self.cooldown} must be in [0, 1], a share of the steps")
        require(self.seed < 2**62, f"seed={self.seed} must be below 2^62")
        require(self.data not in OWN or self.input, f"data={self.data!r} needs --input PATH, a file or folder of yours")
        one_folder = Path(self.name).name == self.name and not self.name.startswith(".")
        require(self.name and one_folder, f"name={self.name!r} must be one folder name, such as 'baseline'")
        free = self.resume or self.name not in GPT2_SIZES
        require(free, f"name={self.name!r} is that of OpenAI's model; give the run another --name")
        return self

    def completed(self, corpus):
        """This Config with what follows from the Corpus: the options of dial(), and the steps of the epochs."""
        config = self.dial(corpus) if self.dial else self
        if not config.epochs:
            return config
        batches = Batches(corpus.train, config.block_size, config.batch_size, config.seed)
        steps = max(1, round(config.epochs * batches.windows_per_epoch / config.batch_size))
        return replace(config, epochs=0.0, steps=steps)

    def gpt_config(self, tokenizer):
        """GPTConfig of the network, for a tokenizer."""
        end = end_of_text(tokenizer) if self.end_of_text is None else self.end_of_text
        hint = f"mask_documents needs an end-of-text token, which the tokenizer {tokenizer.name} of this corpus lacks"
        require(end is not None or not self.mask_documents, f"{hint}; see --tokenizer, or leave mask_documents out")
        values = {field.name: getattr(self, field.name) for field in fields(GPTConfig)}
        return GPTConfig(**values | {"vocab_size": max(self.vocab_size, tokenizer.n_vocab), "end_of_text": end})


def load_config(argv):
    """Config from the command line `[configs/NAME.py] [--flag value ...]`, in any order.

    A config file holds only assignments, which flags override. On a machine without a GPU its dictionary `cpu`, if any,
    replaces values, and TOY those of a large network. With --init_from the network of the weights replaces the file's,
    but for a smaller block_size. With --resume [FOLDER] the run's config.json takes the file's place, and a flag that
    would change the result needs --allow_changes.

    A config file's function dial() derives further options, also from the corpus; until Config.completed() knows that,
    they are those of a large one. They are stored as numbers, so a run resumes with them whatever the formulas become.

    Raises:
        UserError: one sentence that says what to do.
        SystemExit: --help is printed, or without arguments the config files.
    """
    argv = list(argv)
    if not argv:
        print("Name a config, as in: python train.py shakespeare\n")
        for path in sorted(CONFIGS.glob("*.py")):
            about = path.read_text().splitlines()[0].removeprefix("# ")
            print(fold(f"  {path.stem:22}{about}", 24))
        sys.exit()
    path = pop_config_file(argv)
    settings = read_config_file(path) if path else {}
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--resume", nargs="?", const="")
    known, flags = early.parse_known_args(argv)
    if {"-h", "--help"} & {*flags}:
        flags = ["--help"]
    given = {flag[2:].partition("=")[0].replace("-", "_") for flag in flags if flag.startswith("--")}
    require(not {"steps", "epochs"} <= given, "--steps and --epochs both say how long to train; give one of them")
    for name in given & (Options.__dataclass_fields__.keys() - Config.__dataclass_fields__.keys()):
        raise UserError(f"--{name} is an option of python -m data.prepare, which you type first; see docs/data.md")
    cpu, dial = settings.pop("cpu", {}), settings.pop("dial", None)
    typed = parse_flags(Config, [flag for flag in flags if flag != "--help"], settings)
    if known.resume is not None:
        require(not path, "--resume takes the options of the run; leave out the config file")
        require("init_from" not in given, "--resume goes on with the weights of the run; leave out --init_from")
        fits = None if given & {"steps", "epochs"} else has_steps_left
        return resumed_config(find_run(known.resume, "config.json", runs=Path(typed.runs), fits=fits), flags, given)

    if not resolve_device(typed.device).startswith("cuda"):
        if not cpu and settings.get("n_embd", 0) >= TOO_WIDE and not typed.init_from:
            cpu = {name: value for name, value in TOY.items() if name not in given}
            changed = ", ".join(f"{name} {value}" for name, value in cpu.items())
            print(f"note: without a GPU this is a toy, to test the pipeline: {changed}", file=sys.stderr)
        settings |= checked_types(dict(cpu), path)
    if "steps" in given:
        settings["epochs"] = 0.0
    weights = typed.init_from if "init_from" in given else settings.get("init_from")
    if weights and "help" not in given:
        require(not dial, f"{path} sets the network, and so does --init_from; take another config file")
        refuse_nanogpt("init_from", weights, {"init_from"})
        theirs = network_options(weights)
        block_size = min(settings.get("block_size", theirs["block_size"]), theirs["block_size"])
        settings |= theirs | {"block_size": block_size}
    if not dial:
        config = with_text(parse_flags(Config, flags, settings), given).check()
        needed = "--depth and --tokens need a config file with a function dial(), such as configs/modern.py"
        require(not (config.depth or config.tokens), needed)
        return config

    require(not {"steps", "epochs"} & given, f"with {path}, steps follow from --depth and --tokens")
    names = signature(dial).parameters
    numbers = {name: getattr(typed, name) if name in given else settings.get(name) for name in {*names, "vocab_size"}}
    depth = numbers["depth"]
    require(depth and depth > 0, f"depth={depth} must be at least 1, with this config file")

    def complete(vocab_size, corpus_tokens):
        known = numbers | dict(vocab_size=numbers["vocab_size"] or vocab_size, corpus_tokens=corpus_tokens)
        derived = dial(**{name: known[name] for name in names})
        derived = checked_types(derived, f"dial() of {path}")
        return with_text(parse_flags(Config, flags, settings | derived), given).check()

    config = complete(vocab_size=50257, corpus_tokens=10**9)
    # set beside the fields, which are options; replace() leaves it out
    object.__setattr__(config, "dial", lambda corpus: complete(corpus.tokenizer.n_vocab, len(corpus.train)))
    return config


def with_text(config, given):
    """The Config with data="text" if only --input is given, and without a file's input if only --data is."""
    if config.data in OWN or not config.input:
        return config
    if "data" not in given:
        return replace(config, data="text")
    require("input" not in given, f"--data {config.data} takes no --input; for a text of yours leave out --data")
    return replace(config, input="")


def pop_config_file(argv):
    """Take the config file out of a list of arguments: the first that is neither a flag nor the value of one."""
    switches = ["--help", *(f"--{field.name}" for field in fields(Config) if field.type is bool)]
    for index, argument in enumerate(argv):
        flag = argv[index - 1] if index else ""
        is_value = flag.startswith("--") and "=" not in flag and not (flag in switches and argument.endswith(".py"))
        if not (is_value or argument.startswith("-")):
            return Path(argv.pop(index))
    return None


def has_steps_left(folder):
    """Whether the run in a folder is not finished; True if that cannot be read, so that an error will name it."""
    try:
        steps = read_json(folder / "config.json")["steps"]
        return load_checkpoint(checkpoints(folder)[0], weights=False)["step"] < steps
    except (UserError, OSError, LookupError, TypeError):
        return True


def resumed_config(folder, flags, given):
    """Config of the run in a folder, changed by flags; UserError if the changes need --allow_changes."""
    require(folder.is_dir(), f"{folder} is no run's folder; --resume needs one")
    path = folder / "config.json"
    require(path.exists(), f"{folder} has made no step, so there is nothing to resume; give its first command again")
    record = read_options(path)
    gone = ", ".join(sorted(record.keys() - {field.name for field in fields(Config)}))
    require(not gone, f"{folder} has options that this version lacks ({gone}); resume it with the version that made it")
    record = checked_types(record, path)
    record |= {"resume": str(folder), "allow_changes": False}  # changes are allowed only once
    if record.get("tokenizer", "").startswith("run:") and any(folder.glob("*.pt")):
        record["tokenizer"] = f"run:{folder}"  # the same tokenizer; its own run may be gone
    before, config = Config(**record).check(), parse_flags(Config, flags, record).check()
    if given & {"data", "input"}:  # others keep a corpus of an older version, shakespeare with an input
        config = with_text(config, given)
    for name in FIXED_ON_RESUME:
        value, old = getattr(config, name), getattr(before, name)
        require(value == old, f"{folder} has {name}={old}, which cannot change any more; leave out --{name} {value}")
    for name, value in asdict(config).items():  # for data and input, Run compares the tokens
        require(
            value == getattr(before, name) or name in NO_EFFECT | {"data", "input"} or config.allow_changes,
            f"{folder} has {name}={getattr(before, name)}; leave out --{name} {value}, or add --allow_changes",
        )
    return config


def read_config_file(path):
    """The assignments of a config file, by name, and its function dial(), without modules, functions and classes."""
    names = {each.stem: each for each in sorted(CONFIGS.glob("*.py"))}
    path = path if path.is_file() else names.get(str(path), path)  # shakespeare is configs/shakespeare.py
    rule = f"config file {path} does not exist{perhaps(path.stem, names)}"
    require(path.is_file(), f"{rule}; configs/ has {', '.join(names)}, and --resume goes on with a run")
    settings = {
        name: value
        for name, value in runpy.run_path(str(path)).items()
        if name == "dial" or not (name.startswith("_") or callable(value) or isinstance(value, ModuleType))
    }
    require("resume" not in settings, f"{path} sets resume, which is only a flag")
    own = {name: settings.pop(name) for name in ("cpu", "dial") if name in settings}
    require(isinstance(own.get("cpu", {}), dict), f"{path} sets cpu={own.get('cpu')!r}, which must be a dictionary")
    return {"name": path.stem} | own | checked_types(settings, path)


def checked_types(settings, path):
    """The options of a file, with numbers of numpy and paths as Python's numbers and texts.

    Raises:
        UserError: there is no such option, or its value has another type.
    """
    kinds = {field.name: field.type for field in fields(Config)}
    for name, value in settings.items():
        refuse_nanogpt(name, value, kinds)
        kind = kinds.get(name)
        if kind is None:
            rule = f"{path} sets {name}, and there is no option --{name}={value}{perhaps(name, kinds, '--')}"
            raise UserError(f"{rule}; begin the name of a helper with _, as in _{name}")
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, PurePath):
            value = str(value)
        if type(value) is int and float in (kind, *get_args(kind)):
            value = float(value)
        if not is_of(value, kind):
            raise UserError(f"{path} sets {name}={value!r}, which must be {in_words(kind)}; write it as one")
        settings[name] = value
    return settings


def is_of(value, kind):
    """Whether a value is of the type of an option."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return any(is_of(value, each) for each in get_args(kind)) or type(value) is kind
