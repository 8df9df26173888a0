"""A training step, the choice of its micro-batch, and evaluation."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from data import map_ahead
from kernels.fp8 import Scales
from model import require
from training.config import resolve_dtype
from training.fsdp import gather
from training.optimizer import move_average, set_learning_rate

CPU_MICRO_BATCH = 32  # sequences; larger micro-batches gain nothing on a CPU
MEMORY_RESERVE = 0.05  # of a GPU's memory, for compiled code, CUDA graphs and NCCL, which a trial step does not have
PREFETCHED = 2  # batches loaded before they are needed
WARM_UPS = 3  # calls before a CUDA graph is recorded, in which PyTorch compiles, allocates and chooses algorithms
DDP_WARM_UPS = 11  # DDP measures itself in the first 10 steps, which a graph cannot record


def autocast(dtype, device):
    """The context in which the network computes in a dtype, an option of config.dtype.

    Autocast's cache of cast weights is off. A forward pass casts each weight once, so the cache saves nothing. And a
    thread that leaves autocast clears the cache of all threads, which can deadlock with the thread that compiles.
    """
    dtype = resolve_dtype(dtype, device)
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype, cache_enabled=False)


def eagerly():
    """The context in which compiled modules run eagerly.

    Without torch._dynamo, which takes seconds to import, nothing has been compiled.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class TrainStep:
    """One step of training: gradients of all micro-batches, clipping, the optimizer's update.

    A step whose loss or gradient norm is not finite is skipped: weights and moments stay as they are. All of this
    happens on the device, so that the host never waits.

    Args:
        network: of compile_and_wrap(). optimizer: of its parameters. config: Config. ranks: Ranks.
        micro_batch: sequences per forward pass, a divisor of this rank's share of the batch.

    Attributes:
        skipped, bad_in_row: [] float32, steps skipped since the run began, and most recently in a row.
    """

    def __init__(self, network, optimizer, config, ranks, micro_batch):
        self.network, self.optimizer, self.config, self.ranks = network, optimizer, config, ranks
        self.micro_batch, self.autocast = micro_batch, autocast(config.dtype, ranks.device)
        kind = torch.device(ranks.device).type
        self.scaler = torch.amp.GradScaler(kind, enabled=resolve_dtype(config.dtype, ranks.device) == torch.float16)
        self.skipped, self.bad_in_row = torch.zeros(2, device=ranks.device).unbind()
        self.scales = Scales(network) if config.fp8 else None
        redraws = config.checkpoint_activations != "off" and config.dropout > 0  # restores torch's random state
        recordable = ranks.on_gpu and not ranks.sharded and not self.scaler.is_enabled() and not redraws
        warm_ups = WARM_UPS if ranks.world == 1 else DDP_WARM_UPS
        self.graph = CUDAGraph(self._whole_step, warm_ups) if config.cuda_graph and recordable else None

    def __call__(self, step, inputs, targets, rate):
        """Take step number `step` at a learning rate, on this rank's inputs and targets [share, T].

        Returns:
            (loss of the global batch in nats per token, norm of its gradient), [] float32 each, on the device.
        """
        set_learning_rate(self.optimizer, rate)
        share, rank = len(inputs), self.ranks.rank
        batches = [x.to(self.ranks.device, non_blocking=True).split(self.micro_batch) for x in (inputs, targets)]
        if self.scales:
            self.scales.begin()
        loss = 0
        for index, batch in enumerate(zip(*batches, strict=True)):
            if self.config.dropout > 0:  # the masks depend on the rows, not on the rank or on earlier steps
                first_row = rank * share + index * self.micro_batch
                seed = np.random.SeedSequence([self.config.seed, step, first_row]).generate_state(1, np.uint64)[0]
                torch.manual_seed(int(seed))
            if share == self.micro_batch:
                return (self.graph or self._whole_step)(*batch)
            last = (index + 1) * self.micro_batch == share
            # FSDP sums the gradients of each micro-batch over the ranks, because no rank has room for all of them
            one_sum = self.ranks.world > 1 and not self.ranks.sharded
            with self.network.no_sync() if one_sum and not last else nullcontext():
                loss = loss + self._backward(*batch, share)
        return self._update(loss)

    def _whole_step(self, inputs, targets):
        return self._update(self._backward(inputs, targets, len(inputs)))

    def _backward(self, inputs, targets, share):
        """Add the gradients of a micro-batch; returns its part of the loss, a mean over the global batch."""
        with self.autocast:
            loss = self.network(inputs, targets) * (len(inputs) / share)
        self.scaler.scale(loss).backward()
        return loss.detach() / self.ranks.world

    def _update(self, loss):
        if self.ranks.world > 1:
            dist.all_reduce(loss)
        if self.scales:
            self.scales.end(self.ranks.world)
        self.scaler.unscale_(self.optimizer)
        place = "cpu" if self.config.cpu_offload else self.ranks.device  # of the optimizer's state
        grad_norm = get_total_norm([p.grad for p in self.network.parameters() if p.grad is not None])
        grad_norm = gather(grad_norm).to(self.ranks.device)
        # the optimizer divides the gradients by this as it reads them, which saves a pass over them
        self.optimizer.grad_scale = ((grad_norm + 1e-6) / (self.config.grad_clip or math.inf)).clamp(min=1.0).to(place)
        # After max_bad_steps in a row, all further steps are skipped too, so that check_bad_steps() cannot miss them.
        bad = ~(loss.isfinite() & grad_norm.isfinite()) | (self.bad_in_row >= self.config.max_bad_steps)
        self.bad_in_row.add_(1).mul_(bad)
        self.skipped.add_(bad)
        self.optimizer.found_inf = bad.float().to(place)  # a fused optimizer skips its step where this is 1
        self.optimizer.step()
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.config.ema:
            move_average(self.optimizer, self.config.ema)
        return loss, grad_norm

    def check_bad_steps(self, step, batches, folder):
        """ValueError if the last max_bad_steps before `step` were skipped. Waits for the device."""
        bad = int(self.bad_in_row)
        require(
            bad < self.config.max_bad_steps,
            f"loss or gradient norm were not finite in {bad} steps in a row, from step {step - bad + 1} on: "
            f"{batches.describe(step - bad)}; look at that batch, or resume with a lower rate: "
            f"--resume {folder} --learning_rate {self.config.learning_rate / 2:g} --allow_changes",
        )

    def state_dict(self):
        counts = {"skipped": self.skipped, "bad_in_row": self.bad_in_row}
        if self.scales:
            counts["fp8_history"] = self.scales.history
        return counts | {"micro_batch": self.micro_batch, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state):
        if state["scaler"]:  # only float16 has one
            self.scaler.load_state_dict(state["scaler"])
        if self.scales and "fp8_history" in state:  # a run without --fp8 has none
            self.scales.load(state["fp8_history"])
        self.skipped.copy_(state["skipped"])
        bad = state["bad_in_row"]
        self.bad_in_row.copy_(bad * (bad < self.config.max_bad_steps))  # a resumed run gets another chance


class CUDAGraph:
    """A function of tensors that is replayed as a CUDA graph after `warm_ups` calls.

    Its results are overwritten by the next call. Everything else it reads or changes (weights, moments, learning rate)
    must be tensors that stay in place, and it must not wait for the device. Random numbers still follow
    torch.manual_seed().
    """

    def __init__(self, function, warm_ups=WARM_UPS):
        self.function, self.warm_ups, self.calls, self.graph = function, warm_ups, 0, None
        # autograd and the allocator remember the stream: warm up on the recording's, which cannot be the default one
        current = torch.cuda.current_stream()
        self.stream = torch.cuda.Stream() if current == torch.cuda.default_stream() else current

    def __call__(self, *inputs):
        self.calls += 1
        if self.calls <= self.warm_ups:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                results = self.function(*inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            return results
        if self.graph is None:
            self.inputs = [x.clone() for x in inputs]
            self.graph = torch.cuda.CUDAGraph()
            # thread_local: other threads, such as the one that saves a checkpoint, may use the device meanwhile
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.results = self.function(*self.inputs)
        for recorded, x in zip(self.inputs, inputs, strict=True):
            recorded.copy_(x)
        self.graph.replay()
        return self.results


@torch.no_grad()
def evaluate(model, batches, config, ranks):
    """Mean loss in nats per token of a GPT on validation_batches(), which are split over the ranks."""
    parts = []
    model.eval()
    for first in range(0, len(batches), ranks.world):
        index = min(first + ranks.rank, len(batches) - 1)  # a rank without a batch takes part: FSDP needs all ranks
        inputs, targets = (x.to(ranks.device) for x in batches[index]())
        # compiling the evaluation takes longer than it saves
        with eagerly(), autocast(config.dtype, ranks.device):
            parts.append((model(inputs, targets), targets.numel() * (index == first + ranks.rank)))
    model.train()
    if ranks.sharded:
        model.reshard()  # the next step must not find gathered weights: those of an average may have been evaluated
    total = sum(loss.item() * count for loss, count in parts)  # at the end, so that the host does not wait for each
    tokens = sum(count for _, count in parts)
    if ranks.world > 1:
        sums = torch.tensor([total, tokens], dtype=torch.float64, device=ranks.device)
        dist.all_reduce(sums)
        total, tokens = sums.tolist()
    return total / tokens


def prefetch(batches, steps, ranks):
    """Yield this rank's (inputs, targets) [share, T] of each step, loaded by a thread ahead of time.

    On a GPU they are in pinned memory, so that the copy to the device overlaps with the step before.
    """
    share = batches.batch_size // ranks.world
    rows = slice(ranks.rank * share, (ranks.rank + 1) * share)

    def load(step):
        batch = batches.batch(step, rows)
        return [x.pin_memory() for x in batch] if ranks.on_gpu else batch

    with ThreadPoolExecutor(1) as pool:
        for _, batch in map_ahead(pool, load, steps, PREFETCHED):
            yield batch


def choose_micro_batch(model, config, ranks, saved):
    """Sequences per forward pass of one rank: a divisor of the rank's share of the batch.

    saved: the micro-batch of the run that is resumed, or None. It is kept if the option leaves a choice, because
    dropout draws one mask per micro-batch.

    Raises:
        ValueError: the share cannot be divided, or not even one sequence fits into the GPU's memory.
    """
    share, asked = config.batch_size // ranks.world, config.micro_batch
    rows = {0: share, "auto": 1}.get(asked, asked)
    rule = f"batch_size={config.batch_size} must be a multiple of {ranks.world} GPUs x micro_batch={rows}; change one"
    require(share % rows == 0, rule)
    if saved and (asked == "auto" or (asked == 0 and config.dropout > 0)):
        if share % saved == 0:
            return saved
        require(
            config.dropout == 0,
            f"the saved micro-batch ({saved}) does not divide this run's {share} sequences per GPU; take another "
            f"number of GPUs, or accept other dropout masks: --micro_batch {share} --allow_changes",
        )
    if asked != "auto":
        return rows
    divisors = [rows for rows in range(share, 0, -1) if share % rows == 0]
    if not ranks.on_gpu:
        return next(rows for rows in divisors if rows <= CPU_MICRO_BATCH)
    largest = ranks.share(next((rows for rows in divisors if fits(model, rows, config, ranks)), 0))
    remedy = "give --checkpoint_activations blocks, or a smaller network"
    require(largest, f"not even a micro-batch of 1 fits into the GPU's memory; {remedy}")
    return largest


def fits(model, rows, config, ranks):
    """Whether a forward and backward pass of `rows` sequences fits beside the optimizer's state."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    size = 2 * weights + MEMORY_RESERVE * torch.cuda.mem_get_info(ranks.device)[1]
    try:
        room = torch.empty(int(size), dtype=torch.uint8, device=ranks.device)
        tokens = torch.zeros(rows, config.block_size, dtype=torch.int64, device=ranks.device)
        with autocast(config.dtype, ranks.device):
            loss = model(tokens, tokens)
        loss.backward()
        del room  # held until here
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()  # the next trial may not be able to use blocks of these sizes
