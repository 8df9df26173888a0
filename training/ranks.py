"""The processes (ranks) of a run: their devices, what they exchange, how they end, and signals."""

import gc
import os
import signal
import sys
import threading
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn  # before any group exists: imported later, it would keep the group in default arguments

from device import resolve_device
from errors import UserError, command, is_first_on_host, require

SAVE, STOP = 1, 2  # what a signal asks for; STOP saves too
LOST_RANK = ("closed by peer", "reset by peer", "remote process exited", "aborted")  # of gloo, gloo, NCCL, NCCL
HANDLED = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


class Ranks(NamedTuple):
    """This process among those of the run; without torchrun there is only this one."""

    rank: int
    world: int
    device: str
    control: Any = None  # a gloo group, for exchanges between hosts that must not wait for GPUs
    sharded: bool = False  # whether FSDP spreads the network over the ranks

    @property
    def on_gpu(self):
        return self.device.startswith("cuda")

    def broadcast(self, value):
        """Rank 0's `value` (anything that pickles), on all ranks."""
        if self.world > 1:
            shared = [value]
            dist.broadcast_object_list(shared, src=0, group=self.control)
            value = shared[0]
        return value

    def wait(self):
        """Until all ranks have come here."""
        if self.world > 1:
            dist.barrier(self.control)

    def add_up(self, tensor):
        """Replace a tensor on the device by its sum over all ranks."""
        if self.world > 1:
            dist.all_reduce(tensor)

    def add_up_gradients(self, network, is_last):
        """The context of a micro-batch, whose backward pass adds up gradients over ranks: with DDP only the last one's.

        FSDP adds up those of each micro-batch, because no rank has room for all of them.
        """
        keeps_own = self.world > 1 and not self.sharded and not is_last
        return network.no_sync() if keeps_own else nullcontext()


def start_ranks(config):
    """Ranks: join torchrun's process group, if there is one, and take this process's device."""
    device = resolve_device(config.device)
    world = int(os.environ.get("WORLD_SIZE", 1))
    sequences = config.batch_size
    require(sequences % world == 0, f"batch_size={sequences} must be a multiple of the {world} processes; change one")
    if device.startswith("cuda") and world > 1:
        here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        require(here <= gpus, f"{here} processes here need a GPU each, but there are {gpus}: --nproc_per_node={gpus}")
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    fsdp, alone = config.parallel == "fsdp", "RANK" not in os.environ
    require(not (fsdp and alone), "--parallel fsdp needs torchrun: torchrun --nproc_per_node=1 train.py ...")
    if world == 1 and not fsdp:
        return Ranks(0, 1, device)
    lacks = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    rule = f"WORLD_SIZE={world} is set in the environment, but not {', '.join(lacks)}"
    require(not lacks, f"{rule}; unset it, or start several processes with torchrun")
    if device.startswith("cuda"):  # DDP remembers this stream, and a CUDA graph cannot record the default one
        torch.cuda.set_stream(torch.cuda.Stream())
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
    # A long timeout, because rank 0 may prepare a corpus for hours. A rank that dies is noticed at once anyway.
    control = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    return Ranks(dist.get_rank(), world, device, control, fsdp)


@contextmanager
def rank_command(exits, out_of_memory):
    """errors.command() for a process among others: it names the rank that fails, and leaves the group of processes.

    Before the ranks have joined, all ranks of a host fail alike, and only the first one prints.
    exits: whether a mistake of the user ends the process; else it raises UserError.
    """

    def fail(sentence):
        if dist.is_initialized() and dist.get_rank() > 0:
            print(f"error on rank {dist.get_rank()}: {sentence}", file=sys.stderr)
        elif dist.is_initialized() or is_first_on_host():
            print(f"error: {sentence}", file=sys.stderr)
        sys.exit(1)

    try:
        with command(out_of_memory, fail if exits else None):
            try:
                yield
            except RuntimeError as error:
                if not (dist.is_initialized() and any(message in str(error) for message in LOST_RANK)):
                    raise
                reason = str(error).splitlines()[0]
                raise UserError(f"another rank has ended and prints why ({reason})") from error
    finally:
        _leave_group()


def _leave_group():
    """Leave the process group and end its threads, which crash a process if they outlive Python.

    They end with the last reference to the group. Caches of DTensor keep the meshes of FSDP, and a mesh its groups.
    """
    if dist.is_initialized():
        gc.collect()
        for mesh in [each for each in gc.get_objects() if type(each).__name__ == "DeviceMesh"]:
            getattr(mesh, "_pg_registry", {}).clear()
        dist.destroy_process_group()


class Signals:
    """Within this context SIGTERM, SIGINT and SIGHUP ask for STOP and SIGUSR1 for SAVE; a second Ctrl-C exits at once.

    In a notebook, or another program, the second one raises KeyboardInterrupt. A signal that is ignored, as SIGHUP is
    under nohup, stays ignored. A rank that waits for a GPU cannot handle signals; torchrun kills it 30 s after SIGTERM.
    """

    def __init__(self, ranks):
        self.ranks = ranks
        self.asked, self.stopping, self.vote = 0, False, None

    def __enter__(self):
        handled = [n for n in HANDLED if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
        if threading.current_thread() is not threading.main_thread():  # which alone handles signals
            handled = []
        self.before = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(self, kind, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.vote is not None and kind is None:
            self.vote[1].wait()

    def _handle(self, number, _):
        if number == signal.SIGUSR1:
            self.asked = max(self.asked, SAVE)
        elif not self.stopping:
            self.asked, self.stopping = STOP, True
            with suppress(OSError):  # os.write, because print() may be interrupted halfway
                os.write(2, b"\nstopping soon, with a checkpoint; Ctrl-C again exits at once\n")
        elif number == signal.SIGINT:
            if self.before[number] is signal.default_int_handler:  # which a command replaces
                raise KeyboardInterrupt
            os._exit(130)

    def agreed(self):
        """What the signals of all ranks ask for: 0, SAVE or STOP, the same on all ranks. Call it once per step.

        The ranks vote on the CPU while their devices compute, and read the result one call later, so no device waits.
        """
        asked, self.asked = self.asked, 0
        if self.ranks.world == 1:
            return asked
        ballot = torch.tensor(asked, device="cpu")
        work = dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self.ranks.control, async_op=True)
        before, self.vote = self.vote, (ballot, work)
        if before is None:
            return 0
        before[1].wait()
        return int(before[0])
