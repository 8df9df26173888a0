"""The processes of a run: this one among them, what the first does for all, what signals ask of all."""

import os
import signal
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from config import resolve_device
from data import open_corpus

SAVE, STOP = 1, 2  # what signals ask for; STOP includes SAVE
SIGHUP, SIGUSR1 = (getattr(signal, name, None) for name in ("SIGHUP", "SIGUSR1"))  # Windows lacks both


class Distributed(NamedTuple):
    """This process among those of the run; without torchrun it is the only one."""

    rank: int
    world: int
    device: str
    control: Any = None  # a group of hosts, for what must not wait for devices

    @property
    def is_main(self):
        return self.rank == 0

    def share(self, value):
        """The first rank's `value` (anything that pickles), on all ranks; the others wait for it."""
        if self.world > 1:
            shared = [value]
            dist.broadcast_object_list(shared, src=0, group=self.control)
            value = shared[0]
        return value

    def smallest(self, value):
        """The smallest of the integers that the ranks have, on all ranks."""
        if self.world > 1:
            shared = torch.tensor(value)
            dist.all_reduce(shared, dist.ReduceOp.MIN, group=self.control)
            value = int(shared)
        return value


def start_distributed(config):
    """Join torchrun's process group, if there is one, and take this process's device."""
    device = resolve_device(config.device)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if device == "cuda" and world > 1:
        here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if here > gpus:
            raise ValueError(
                f"{here} processes here want a GPU each, but there are {gpus}; start as many as that by "
                f"--nproc_per_node={gpus}"
            )
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    if world == 1:
        return Distributed(0, 1, device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    # Long, because the first rank may prepare a corpus for hours; a rank that dies is noticed at once all the same.
    control = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    return Distributed(dist.get_rank(), world, device, control)


def check_agreement(config, distributed):
    """ValueError unless all ranks have the first one's configuration; each may have found another newest run."""
    mine, first = asdict(config), distributed.share(asdict(config))
    if mine != first:
        name = next(name for name in mine if mine[name] != first[name])
        raise ValueError(f"{name} is {mine[name]!r} here and {first[name]!r} on the first rank; name it by --{name}")


def open_on_all_ranks(config, distributed, digest):
    """The Corpus, which the first rank prepares if need be; the others then find it prepared.

    digest: on the first rank, of tokens that will do, whatever has become of their text; None if there are none yet.
    """
    digest = distributed.share(digest)
    arguments = (config.data, config.tokenizer, config.input or None)
    corpus = open_corpus(*arguments, digest=digest) if distributed.is_main else None
    first = distributed.share(corpus and corpus.digest())
    corpus = corpus or open_corpus(*arguments, digest=digest, quiet=True)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        corpus.trust(first)
    elif corpus.digest() != first:
        raise ValueError(
            f"the tokens in {corpus.folder} are not those of the first machine; give all the same text, or one GPT_DATA"
        )
    return corpus


def is_lost(error):
    """Whether an error says that another rank has gone, which has an error of its own."""
    said = ("closed by peer", "reset by peer", "remote process exited", "aborted")  # gloo, gloo, NCCL, NCCL
    return dist.is_initialized() and any(part in str(error) for part in said)


def ignore_saves():
    """Let SIGUSR1, which asks for a checkpoint, not end a process that has none to write."""
    if SIGUSR1 is not None:
        signal.signal(SIGUSR1, signal.SIG_IGN)


class Signals:
    """While it is entered, SIGTERM, SIGINT and SIGHUP ask for STOP, SIGUSR1 for SAVE; a second Ctrl-C exits at once.

    Under nohup, where SIGHUP is ignored, it goes on to be.
    """

    def __init__(self, distributed):
        self.distributed = distributed
        self.asked, self.stopping, self.vote = 0, False, None

    def __enter__(self):
        heard = [n for n in (signal.SIGTERM, signal.SIGINT, SIGHUP, SIGUSR1) if n is not None]
        if SIGHUP is not None and signal.getsignal(SIGHUP) == signal.SIG_IGN:
            heard.remove(SIGHUP)
        self.before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, kind, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.vote is not None and kind is None:
            self.vote[1].wait()

    def _hear(self, number, _):
        if number == SIGUSR1:
            self.asked = max(self.asked, SAVE)
        elif not self.stopping:
            self.asked, self.stopping = STOP, True
            with suppress(OSError):
                os.write(2, b"\nstopping: the step is finished and saved; Ctrl-C exits at once\n")  # print may be busy
        elif number == signal.SIGINT:
            os._exit(130)

    def agreed(self):
        """What signals asked for: 0, SAVE or STOP, the same on all ranks that call it as often.

        The ranks vote on the CPU while the device works on, and hear the result one call later: nobody waits.
        """
        asked, self.asked = self.asked, 0
        if self.distributed.world == 1:
            return asked
        ballot = torch.tensor(asked)
        work = dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self.distributed.control, async_op=True)
        before, self.vote = self.vote, (ballot, work)
        if before is None:
            return 0
        before[1].wait()
        return int(before[0])
