"""In how many threads PyTorch computes on a CPU: one for each core, and fewer while other work takes the cores."""

import math
import os
import time
from contextlib import suppress
from pathlib import Path

import torch

from device import note

VARIABLES = "OMP_", "GOMP_", "MKL_NUM_THREADS"  # beginnings of the names by which a user chooses threads
WAITS = 0.15  # of a thread's time that it waits for a core: then there are too many threads


def usable_cores(groups="/sys/fs/cgroup"):
    """Cores that this process may use, by its affinity and the quota of its control group, as of docker run --cpus."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # of control groups 2 and 1
        with suppress(OSError, ValueError):  # no such file; or "max", no quota
            quota, period = map(int, " ".join(Path(groups, file).read_text() for file in files).split())
            cores = min(cores, math.ceil(quota / period)) if quota > 0 else cores
    return cores


class Threads:
    """The threads of PyTorch on a CPU.

    They wait for each other many times a step, spinning. When one waits for a core, all do: on two cores beside one
    busy process, two threads compute half as fast as one. Linux tells how long threads have waited for cores; on other
    systems their number stays. The order of sums, and so their last bits, depends on it.
    """

    most = None  # threads when all cores are free; None where nothing is computed on a CPU
    fixed = True  # whether the number stays

    def start(self, most=None, fixed=False):
        """Compute in `most` threads, or in one for each core, unless the environment says how many."""
        self.stop()
        chosen = any(name.startswith(VARIABLES) for name in os.environ)
        self.before, self.fixed = torch.get_num_threads(), fixed or chosen
        self.most = most or (self.before if chosen else min(self.before, usable_cores()))
        self.times, self.patience, self.lowered = times(), 5, 0
        self._set(self.most)

    def stop(self):
        """Compute in as many threads as before start(), unless another has changed their number."""
        if self.most and torch.get_num_threads() == self.now:
            torch.set_num_threads(self.before)
        self.most, self.fixed = None, True

    def _set(self, number):
        self.now = number
        torch.set_num_threads(number)

    def share(self):
        """Compute in fewer threads if they waited for cores since the last call, and some time later in all again.

        Call it between two steps, as often as you like. It changes nothing before start().
        """
        if self.fixed or time.perf_counter() < self.times[0] + 1:
            return
        before, self.times, threads = self.times, times(), torch.get_num_threads()
        seconds, ran, waited = (now - then for now, then in zip(self.times, before, strict=True))
        needed = threads * seconds
        if threads > 1 and waited > WAITS * needed and ran < (1 - WAITS) * needed:  # so it waited for other processes
            fewer = min(threads - 1, max(1, int(ran / seconds + 0.25)))
            note(f"threads wait for CPU cores; computing in {fewer} of {threads} until other work has ended")
            self._set(fewer)
            self.lowered, self.patience = self.times[0], min(2 * self.patience, 600)  # if it comes and goes, wait
        elif threads < self.most and waited < WAITS * needed and self.times[0] > self.lowered + self.patience:
            self._set(self.most)


def times():
    """Seconds on the clock, and in which this process's threads have run, and have waited for a core, on Linux."""
    found = []
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has ended
            found.append([int(number) for number in file.read_text().split()[:2]])
    ran, waited = (sum(each) / 1e9 for each in zip(*found, strict=True)) if found else (0, 0)
    return time.perf_counter(), ran, waited


cpu_threads = Threads()  # one, because PyTorch's number is the process's
