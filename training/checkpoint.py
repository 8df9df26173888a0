"""Run folders and checkpoints: one file holds everything that a run needs to resume.

    runs/NAME/config.json             the options
    runs/NAME/kestrel.json            the tokenizer
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import filelock
import torch
from torch.utils._pytree import tree_map_only

from data.corpus import open_corpus
from data.files import atomic_file, can_write, lock_file, make_folders
from data.tokenizer import STORED, to_state
from errors import UNFINISHED, UserError, is_first_on_host, quote, require
from model import GPTConfig
from threads import cpu_threads
from training.fsdp import gather, spread_like
from weights import FORMAT, NOT_OF_WEIGHTS, checkpoints, load_checkpoint, load_first


class Run(ExitStack):
    """The folder of a run, in which rank 0 saves checkpoints while training goes on.

    The end of its context waits for the last checkpoint and unlocks the folder.

    saved: contents of the checkpoint to resume from, until begin() has loaded it; {} for a new run.
    """

    def __init__(self, config, ranks):
        super().__init__()
        self.config, self.ranks = config, ranks
        self.folder = Path(config.resume) if config.resume else None
        self.saved = load_first(checkpoints(self.folder)) if self.folder else {}
        self.on_disk = self.saved.get("step")  # that of checkpoint.pt
        self.writing, self.error = {}, None
        same = ranks.broadcast(self.on_disk) == self.on_disk
        require(same, f"the ranks found different checkpoints in {self.folder}; give all hosts the same runs/")

    def open_corpus(self, argv):
        """The Corpus. The first rank of each host prepares it if need be, and then the other ranks open it.

        A resumed run finds the tokens of its checkpoint by their sha256, wherever their text is now, unless a text or
        tokenizer is named: by the command line argv, or in config after a crash before the first checkpoint with it.
        """
        config, ranks, before, sha256 = self.config, self.ranks, self.saved.get("config"), None
        if before and not {flag.partition("=")[0] for flag in argv} & {"--data", "--input", "--tokenizer"}:
            same_tokenizer = config.tokenizer in (before["tokenizer"], f"run:{config.resume}")
            if same_tokenizer and (config.data, config.input) == (before["data"], before["input"]):
                sha256 = self.saved["tokens_sha256"]
        open_here = partial(open_corpus, config.data, config.tokenizer, config.input or None)
        corpus = open_here(sha256=sha256, verify=config.verify) if is_first_on_host() else None
        expected = ranks.broadcast(corpus and corpus.sha256)
        ranks.wait()  # for the first rank of every host
        corpus = corpus or open_here(sha256=expected)  # without another look at the text
        rule = f"the tokens in {corpus.folder} differ from rank 0's; give all hosts the same text, or one GPT_DATA"
        require(corpus.sha256 == expected, rule)
        return corpus

    def begin(self, config, corpus, model, optimizer):
        """Take the folder and load the checkpoint; returns (first step, loss of best.pt), (0, inf) for a new run.

        Raises:
            UserError: the checkpoint is from another run than config and corpus, or another process trains here.
        """
        self.config, self.corpus = config, corpus
        if self.saved:
            self._check()
        if self.ranks.rank == 0:
            self.folder = self.folder or make_folder(Path(config.runs), config.name)
            try:
                self.callback(lock_file(self.folder / ".lock", timeout=0).release)
            except filelock.Timeout:
                raise UserError(f"another process is training {self.folder}; stop it first") from None
            self.good = []  # checkpoints that could be loaded, newest first; the next save removes damaged ones
            if self.saved:
                paths = checkpoints(self.folder)
                self.good = paths[paths.index(self.saved["path"]) :]
            self.pool = self.enter_context(ThreadPoolExecutor(1))
        self.folder = self.ranks.broadcast(self.folder)
        start, best = self.saved.get("step", 0), math.inf
        if self.ranks.device == "cpu" and self.ranks.world == 1:
            threads = self.saved.get("threads")  # on which the order of sums depends
            compiles = config.compile in ("model", "blocks")  # for a number of threads
            cpu_threads.start(threads, fixed=bool(threads) or config.deterministic or compiles)
            self.callback(cpu_threads.stop)
        if self.saved:
            load_weights(model, self.saved)
            optimizer.load(self.saved)
            self.saved = {}  # a mapped file that is deleted takes up disk space until then
        if config.resume:
            with suppress(OSError, UserError):  # of a best.pt that is missing or damaged; it may be newer than `saved`
                best = load_checkpoint(self.folder / "best.pt", weights=False)["best"]
        return start, self.ranks.broadcast(best)

    def _check(self):
        config, corpus, saved = self.config, self.corpus, self.saved
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

    def commit(self):
        """Write config.json and the tokenizer. From now on, after the first step, an error leaves the folder."""
        UNFINISHED.clear()
        if self.ranks.rank == 0:
            for leftover in self.folder.glob(".*.tmp"):  # of a process that was killed while writing
                leftover.unlink()
            with atomic_file(self.folder / STORED) as file:
                file.write(json.dumps({"tokenizer": to_state(self.corpus.tokenizer)}).encode())
            with atomic_file(self.folder / "config.json") as file:
                file.write((json.dumps(asdict(self.config), indent=2) + "\n").encode())

    def save_best(self, step, best, model):
        """Copy the weights to the host of rank 0 and start to write best.pt. All ranks call this."""
        self._write_later("best.pt", self._model_contents(step, best, model))

    def save(self, step, best, loss, val_loss, model, optimizer, micro_batch):
        """Copy all that a run needs to resume, and start to write checkpoint.pt.

        While training diverges, all checkpoints stay as they are. If none is written for this reason, or because
        writing fails, a warning is printed and training goes on; close() raises if that was the last one.

        Args:
            best: lowest validation loss so far. loss, val_loss: the latest ones; val_loss may be None.
        """
        if problem := divergence(best, float(loss), val_loss, int(optimizer.bad_in_row), model.config.vocab_size):
            if self.ranks.rank == 0:
                self._wait("checkpoint.pt")
                command = f"--resume {quote(self.folder)} --learning_rate LOWER --allow_changes"
                self._fail_later(
                    f"no checkpoint of step {step} is written: {problem}; go on from the one before: {command}"
                )
            return
        threads = cpu_threads.most if self.ranks.world == 1 else None
        contents = self._model_contents(step, best, model) | optimizer.state()
        self._write_later("checkpoint.pt", contents | dict(micro_batch=micro_batch, threads=threads))

    def _model_contents(self, step, best, model):
        return dict(
            format=FORMAT, config=asdict(self.config), model_config=asdict(model.config),
            model=model.state_dict(keep_vars=True), tokenizer=to_state(self.corpus.tokenizer),
            tokens_sha256=self.corpus.sha256, step=step, best=best,
        )  # fmt: skip

    def _write_later(self, name, contents):
        here = self.ranks.rank == 0
        if not (here or self.ranks.sharded):
            return
        self._wait(name)  # so that memory holds one copy of each file at most
        contents = to_host(contents, here)
        if here:
            copied = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
            self.writing[name] = contents, self.pool.submit(self._write, name, contents, copied)

    def _wait(self, name):
        if name in self.writing:
            # This thread frees the copy. If another freed pinned memory while a CUDA graph is recorded, CUDA would call
            # the event that PyTorch records for it invalid, and so every later use of pinned memory would fail.
            self.writing.pop(name)[1].result()

    def _fail_later(self, error):
        self.error = error  # which close() raises, unless a later checkpoint is written
        print(f"warning: {error}", file=sys.stderr)

    def _write(self, name, contents, copied):
        try:
            if copied:
                copied.synchronize()
            path = self.folder / name
            if name == "checkpoint.pt" and self.config.keep > 1 and path in self.good:
                self.good[0] = path.rename(self.folder / f"checkpoint-{self.on_disk}.pt")
            save_checkpoint(path, contents)
            if name == "checkpoint.pt":
                self.on_disk, self.error = contents["step"], None
                self.good = [path, *self.good][: self.config.keep]
                for old in set(checkpoints(self.folder)) - set(self.good):
                    old.unlink()
        except Exception as error:  # only this thread can report it. torch.save raises many types
            reason = (str(error.__context__ or error) or type(error).__name__).splitlines()[0]
            self._fail_later(f"no {name} of step {contents['step']} could be written ({reason}); make room on the disk")

    def close(self):
        """Wait for the last checkpoint, and unlock the folder; UserError if it could not be written."""
        super().close()
        if self.error is not None:
            raise UserError(self.error)


def divergence(best, loss, val_loss, bad_in_row, vocab_size):
    """Why the weights must not replace a good checkpoint; None if they may. bad_in_row: skipped steps before this."""
    if bad_in_row:
        return f"the last {bad_in_row} steps were skipped, because loss or gradient norm were not finite"
    if val_loss is not None and not math.isfinite(val_loss):
        return "the validation loss is not finite"
    # Behind RMSNorm, huge weights may give logits of 0. A high validation loss alone could be overfitting.
    guessing = math.log(vocab_size)
    if best < 0.9 * guessing and loss > 0.99 * guessing:
        return f"the loss has risen from {best:.2f} to {loss:.2f}; guessing has {guessing:.2f}"
    return None


def make_folder(runs, name):
    """Make and return runs/NAME, or runs/NAME-2, -3, ... if that exists: a new run overwrites nothing."""
    make_folders(runs)
    for number in itertools.count(1):
        folder = runs / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError), can_write(folder):
            folder.mkdir()
            UNFINISHED.add(folder)  # until its first step
            return folder


def save_checkpoint(path, contents):
    """Write a dict of tensors and plain values, whole or not at all."""
    with atomic_file(path) as file:
        torch.save(contents, file)


def load_weights(model, contents):
    """Copy the weights of a loaded checkpoint into a GPT; UserError if its configuration differs."""
    saved = asdict(GPTConfig(**contents["model_config"]))
    for name, value in asdict(model.config).items():
        same = saved[name] == value or name in NOT_OF_WEIGHTS
        require(same, f"the checkpoint holds another model: its {name} is {saved[name]!r}, not {value!r}")
    copy_weights(model, contents["model"])


@torch.no_grad()
def copy_weights(model, weights):
    """Copy a state_dict of whole tensors into a GPT, which FSDP may have spread."""
    for name, parameter in model.state_dict().items():
        parameter.copy_(spread_like(parameter, weights[name]))


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

    return tree_map_only(torch.Tensor, copy, value)
