"""Run folders and checkpoints: one file holds everything that a run needs to resume.

    runs/NAME/config.json             the options
    runs/NAME/checkpoint.pt           the newest checkpoint
    runs/NAME/checkpoint-STEP.pt      older ones, as many as --keep leaves
    runs/NAME/best.pt                 the weights with the lowest validation loss

A checkpoint is written to a temporary name, flushed to disk and then renamed, so a crash leaves the older one. Resuming
skips a damaged checkpoint and takes the one before it.
"""

import itertools
import json
import math
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

import filelock
import torch
from torch.overrides import TorchFunctionMode

from data import atomic_file, to_state
from model import GPT, GPTConfig, require
from training.fsdp import from_rank_0, gather

RUNS = Path("runs")
FORMAT = 1
# options that do not come with weights
HERE_ONLY = ("dropout", "attention", "mask_documents", "end_of_text")
# Options that this version no longer has: the value that changes nothing in a trained network. For all others that
# are gone it is False or 0.
GONE = {"head_scale": 1.0, "zero_init": True}


class Run:
    """The folder of a run, in which rank 0 saves checkpoints while training goes on.

    saved: contents of the checkpoint to resume from; {} begins at step 0. Raises ValueError if it is from another run
    than config and corpus, or if another process trains in this folder.
    """

    def __init__(self, config, corpus, ranks, saved):
        self.config, self.corpus, self.ranks, self.saved = config, corpus, ranks, saved
        self.folder = Path(config.resume) if config.resume else None
        self.step = saved.get("step")  # of checkpoint.pt
        self.writing, self.error = None, None
        if saved:
            self._check_saved()
        if ranks.rank == 0:
            try:
                self.folder = self.folder or make_folder(config.name)
                self.lock = filelock.FileLock(self.folder / ".lock", timeout=0)
                self.lock.acquire()
            except filelock.Timeout:
                raise ValueError(f"another process is training {self.folder}; stop it first") from None
            for leftover in self.folder.glob(".*.tmp"):  # of a process that was killed while writing
                leftover.unlink()
            for path in checkpoints(self.folder):
                if saved and path == saved["path"]:
                    break
                path.rename(f"{path}.damaged")  # load_first() could not load it
            self.pool = ThreadPoolExecutor(1)
        self.folder = ranks.share(self.folder)

    def _check_saved(self):
        config, saved, corpus = self.config, self.saved, self.corpus
        step, tokens_sha256 = saved["step"], saved["tokens_sha256"]
        finished = f"{self.folder} is finished at step {step}; to train on, give more --steps and --allow_changes"
        require(step < config.steps, finished)
        same_tokenizer = saved["tokenizer"] == to_state(corpus.tokenizer)
        require(same_tokenizer, f"{self.folder} was trained with another tokenizer; change --tokenizer back")
        require(
            tokens_sha256 == corpus.sha256 or config.allow_changes,
            f"the tokens in {corpus.folder} (sha256 {corpus.sha256[:12]}) are not those of {self.folder} "
            f"({tokens_sha256[:12]}); prepare the same text again, or add --allow_changes",
        )

    def load(self, model, optimizer, take_step):
        """Load the checkpoint into these three; returns (first step, best loss so far), (0, inf) for a new run."""
        saved, self.saved = self.saved, None  # frees its memory
        if saved:
            load_weights(model, saved, self.ranks)
            same_optimizer = len(saved["optimizer"]["param_groups"]) == len(optimizer.param_groups)
            another = "another --optimizer or --embed_scale; change it back"
            require(same_optimizer, f"{self.folder} was trained with {another}")
            options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = {
                index: {
                    name: from_rank_0(value, parameters[index], self.ranks)
                    for name, value in values.items()
                    if name != "average" or self.config.ema
                }
                for index, values in saved["optimizer"]["state"].items()
            }
            optimizer.load_state_dict(saved["optimizer"] | {"state": state})
            for group, option in zip(optimizer.param_groups, options, strict=True):
                group.update(option)  # this process's flags count, not the checkpoint's
            take_step.load_state_dict(saved["take_step"])
            if saved["threads"] and not self.ranks.on_gpu and self.ranks.world == 1:
                torch.set_num_threads(saved["threads"])  # on a CPU the order of sums depends on it
        if self.ranks.rank == 0:  # only now, because a run that is refused must stay as it was
            with atomic_file(self.folder / "config.json") as file:
                file.write((json.dumps(asdict(self.config), indent=2) + "\n").encode())
        return (saved["step"], saved["best"]) if saved else (0, math.inf)

    def save(self, step, best, is_best, model, optimizer, take_step, newest=True):
        """Copy a checkpoint to the host of rank 0 and start to write it. All ranks call this.

        newest: write checkpoint.pt; is_best: write best.pt. If writing fails, a warning is printed and training goes
        on; close() raises if the last one failed.
        """
        here = self.ranks.rank == 0
        if not (here or self.ranks.sharded):
            return
        if here:
            self.wait()  # so that memory holds one copy at most
        weights = dict(
            format=FORMAT, config=asdict(self.config), model_config=asdict(model.config),
            model=model.state_dict(keep_vars=True),
            tokenizer=to_state(self.corpus.tokenizer), tokens_sha256=self.corpus.sha256, step=step, best=best,
        )  # fmt: skip
        average = {}  # of the weights, which best.pt has
        if is_best and self.config.ema:
            average = {name: optimizer.state[p]["average"] for name, p in weights["model"].items()}
        threads = torch.get_num_threads() if self.ranks.world == 1 else None
        state = dict(optimizer=optimizer.state_dict(), take_step=take_step.state_dict(), threads=threads)
        weights, average, state = to_host((weights, average, state if newest else {}), here)
        if not here:
            return
        copied = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        best_weights = weights | {"model": average or weights["model"]} if is_best else None
        self.writing = self.pool.submit(self._write, weights, state, best_weights, copied)

    def _write(self, weights, state, best_weights, copied):
        if copied:
            copied.synchronize()
        try:
            if best_weights:
                save_checkpoint(self.folder / "best.pt", best_weights)
            if state:
                newest = self.folder / "checkpoint.pt"
                if self.config.keep > 1 and newest.exists():
                    newest.rename(self.folder / f"checkpoint-{self.step}.pt")
                save_checkpoint(newest, weights | state)
                self.step, self.error = weights["step"], None
                for path in checkpoints(self.folder)[self.config.keep :]:
                    path.unlink()
        except Exception as error:  # only this thread can report it. torch.save raises many types
            reason = (str(error.__context__ or error) or type(error).__name__).splitlines()[0]
            self.error = f"no checkpoint of step {weights['step']} could be written ({reason}); make room on the disk"
            print(f"warning: {self.error}", file=sys.stderr)

    def wait(self):
        """Wait until the checkpoint being written is on disk, or has failed."""
        if self.writing is not None:
            self.writing.result()

    def close(self):
        """Wait for the last checkpoint; OSError if it could not be written."""
        if self.ranks.rank == 0:
            self.wait()
            self.pool.shutdown()
            self.lock.release()
            if self.error is not None:
                raise OSError(self.error)


def make_folder(name):
    """Make and return runs/NAME, or runs/NAME-2, -3, ... if that exists: a new run overwrites nothing."""
    for number in itertools.count(1):
        folder = RUNS / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def newest_run(*also):
    """The run folder with the newest checkpoint, or newest file that matches one of the patterns `also`."""
    found = [path for pattern in ("checkpoint*.pt", *also) for path in RUNS.glob(f"*/{pattern}")]
    if not found:
        raise ValueError(f"no run in {RUNS}/; train one first: python train.py configs/shakespeare.py")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def checkpoints(folder):
    """Paths of the folder's checkpoints with optimizer state, newest first."""
    folder = Path(folder)
    steps = (path.stem.partition("-")[2] for path in folder.glob("checkpoint-*.pt"))
    older = sorted((int(step) for step in steps if step.isdecimal()), reverse=True)
    names = ["checkpoint.pt", *(f"checkpoint-{step}.pt" for step in older)]
    return [path for name in names if (path := folder / name).exists()]


def load_first(paths, weights=True):
    """Contents of the first checkpoint that is not damaged, with a warning for those before it; {} without paths."""
    for path in paths[:-1]:
        try:
            return load_checkpoint(path, weights)
        except ValueError as error:
            print(f"warning: {error}", file=sys.stderr)
    return load_checkpoint(paths[-1], weights) if paths else {}


def load_on_rank_0(paths, ranks):
    """load_first() on rank 0; on the other ranks the same, with weights and moments on the device "meta"."""
    saved = load_first(paths) if ranks.rank == 0 else None
    large = {name: map_tensors(lambda x: x.to("meta"), saved[name]) for name in ("model", "optimizer") if saved}
    shared = ranks.share(saved and saved | large)
    return shared if saved is None else saved


def save_checkpoint(path, contents):
    """Write a dict of tensors and plain values, whole or not at all."""
    with atomic_file(path) as file:
        torch.save(contents, file)


def load_checkpoint(path, weights=True):
    """The contents of a checkpoint, mapped into memory, and its "path". Nothing in it is executed (weights_only).

    Without `weights` the tensors are not read, so damage to them is not noticed.

    Raises:
        ValueError: it is damaged, or not a checkpoint of this project. OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as file:  # torch.load does not check the checksums
            broken = weights and file.testzip()
        if broken:
            raise ValueError(f"wrong checksum of {broken}")
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, MemoryError):  # the file may be good
        raise
    except Exception as error:  # zipfile and torch.load raise a dozen types for a damaged file
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        raise ValueError(f"checkpoint {path} cannot be read ({reason}); use another one") from error
    ours = isinstance(contents, dict) and contents.get("format") == FORMAT
    require(ours, f"checkpoint {path} is not of this project's format {FORMAT}; use another one")
    return contents | {"path": path}


class SkipInitialisation(TorchFunctionMode):
    """Skips torch.nn.init: it takes longer than reading the weights, and on the device "meta" it imports Dynamo."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) == "torch.nn.init":
            return None
        return function(*args, **kwargs or {})


def known_options(saved, kind):
    """Saved options of the dataclass `kind`, without those that it no longer has, if they had no effect."""
    known = {field.name for field in fields(kind)}
    return {name: value for name, value in saved.items() if name in known or value not in (False, GONE.get(name))}


def empty_model(config, device="cpu"):
    """A GPT with arbitrary weights, or on the device "meta" with none."""
    with torch.device(device), SkipInitialisation():
        model = GPT(config, seed=None)
    return model if device == "meta" else model.to(device)  # rotary angles are made on the CPU


def load_weights(model, contents, ranks):
    """Copy the weights of a loaded checkpoint into a GPT; ValueError if its configuration differs."""
    saved = asdict(GPTConfig(**known_options(contents["model_config"], GPTConfig)))
    for name, value in asdict(model.config).items():
        same = saved[name] == value or name in HERE_ONLY
        require(same, f"the checkpoint holds another model: its {name} is {saved[name]!r}, not {value!r}")
    copy_weights(model, contents["model"], ranks)


@torch.no_grad()
def copy_weights(model, weights, ranks):
    """Copy rank 0's state_dict into a GPT on all ranks, one tensor at a time; the other ranks need none."""
    for name, parameter in model.state_dict().items():
        here = ranks.rank == 0
        whole = weights[name] if here else torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        parameter.copy_(from_rank_0(whole, parameter, ranks))


def map_tensors(function, value):
    """Nested dicts, lists and tuples with a function applied to their tensors."""
    if isinstance(value, dict):
        return {name: map_tensors(function, part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, part) for part in value)
    return function(value) if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def to_host(value, keep=True):
    """Nested dicts, lists and tuples with their tensors copied to the host; tied weights stay tied.

    Tensors that FSDP spreads are gathered one by one; a rank that does not `keep` them gets None in their place.
    Other tensors on a GPU are copied to pinned memory, after the work that is queued there and without waiting for it.
    Gathered tensors are not: PyTorch rounds the size of pinned memory up to a power of two.
    """
    copies = {}

    def copy(tensor):
        if id(tensor) not in copies:
            whole, host = gather(tensor), None
            if keep:
                pinned = whole.is_cuda and whole is tensor
                host = torch.empty_like(whole, device="cpu", pin_memory=pinned)
                host.copy_(whole, non_blocking=pinned)
            copies[id(tensor)] = host
        return copies[id(tensor)]

    return map_tensors(copy, value)
