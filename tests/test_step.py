"""A training step, its micro-batches, batches loaded ahead of time, and evaluation."""

import copy
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import equal

from data import Batches, validation_batches
from data.shards import Tokens
from data.tokenizer import CharTokenizer
from model import GPT
from training import step as training_step
from training.config import Config
from training.distributed import Ranks
from training.optimizer import make_optimizer
from training.step import CPU_MICRO_BATCH, PREFETCHED, TrainStep, choose_micro_batch, evaluate, fits, prefetch

SMALL = dict(vocab_size=16, n_layer=1, n_head=2, n_embd=16, block_size=8, batch_size=8, device="cpu", attention="sdpa")
ONE = Ranks(0, 1, "cpu")
NAN, INF = float("nan"), float("inf")
SIXTEEN = CharTokenizer("0123456789abcdef")


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def tokens(count):
    ids = np.random.default_rng(0).integers(16, size=count).astype("<u2")
    return Tokens((ids,), sha256="", documents=1, text_bytes=count)


@pytest.fixture
def batches():
    return Batches(tokens(400), block_size=8, batch_size=8, seed=1)


@pytest.fixture
def process_group():
    """A process group of this process alone, in which sums over all ranks leave a value as it is."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_step(micro_batch=8, ranks=ONE, **options):
    """(model, TrainStep), always with the same weights."""
    torch.manual_seed(0)
    config = Config(**SMALL | dict(micro_batch=micro_batch) | options)
    model = GPT(config.model(SIXTEEN))
    return model, TrainStep(model, make_optimizer(model, config, ranks), config, ranks, micro_batch)


def train(take_step, batches, steps):
    """[(loss, gradient norm)] of some steps."""
    return [tuple(x.item() for x in take_step(step, *batches.batch(step), 1e-2)) for step in steps]


def state(model, take_step):
    return copy.deepcopy((model.state_dict(), take_step.optimizer.state_dict()["state"]))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("bad", ["gradient", "loss", None])
def test_a_skipped_step_changes_nothing(bad, optimizer, batches):
    """Neither weights nor moments nor step counts. The step after it is taken again."""
    model, take_step = make_step(optimizer=optimizer)
    train(take_step, batches, [0])
    before = state(model, take_step)
    if bad == "gradient":
        hook = model.norm.weight.register_hook(lambda gradient: gradient * INF)
    elif bad == "loss":
        hook = model.register_forward_hook(lambda module, inputs, loss: loss + NAN)  # its gradients are finite
    train(take_step, batches, [1])
    assert equal(state(model, take_step), before) == (bad is not None)
    assert take_step.skipped == take_step.bad_in_row == (bad is not None)
    if bad:
        hook.remove()
        train(take_step, batches, [2])
        assert take_step.skipped == 1 and take_step.bad_in_row == 0
        assert not any(map(equal, state(model, take_step), before))


def test_too_many_bad_steps_in_a_row_are_noticed_even_after_they_end(batches):
    """Between two checks the loss may be finite again. The message names the first bad batch and a remedy."""
    model, take_step = make_step(max_bad_steps=3, learning_rate=1e-2)
    hook = model.norm.weight.register_hook(lambda gradient: gradient * NAN)
    train(take_step, batches, [0, 1])
    take_step.check_bad_steps(2, batches, "runs/run")  # two are allowed
    hook.remove()
    train(take_step, batches, [2])
    hook = model.norm.weight.register_hook(lambda gradient: gradient * NAN)
    train(take_step, batches, [3, 4, 5])
    hook.remove()
    before = state(model, take_step)
    train(take_step, batches, [6])
    assert equal(state(model, take_step), before)
    with pytest.raises(ValueError) as error:
        take_step.check_bad_steps(7, batches, "runs/run")
    for part in (batches.describe(3), "--resume runs/run", "--learning_rate 0.005", "--allow_changes"):
        assert part in str(error.value), error.value
    _, resumed = make_step(max_bad_steps=3)
    resumed.load_state_dict(take_step.state_dict())
    resumed.check_bad_steps(7, batches, "runs/run")  # gets another chance
    assert resumed.skipped == take_step.skipped == 6


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_micro_batches_give_the_same_losses_as_one_batch(micro_batch, batches):
    whole, parts = (train(make_step(size)[1], batches, range(5)) for size in (8, micro_batch))
    assert parts == [pytest.approx(pair, rel=1e-5) for pair in whole]


@pytest.mark.parametrize("grad_clip, used", [(1e-2, 1e-2), (100.0, None), (0.0, None)])
def test_gradient_clipping(grad_clip, used, batches):
    model, take_step = make_step(grad_clip=grad_clip)
    model.head.weight.data *= 50  # for a gradient whose norm is above 1
    ((_, norm),) = train(take_step, batches, [0])
    moments = [moments["exp_avg"] for moments in take_step.optimizer.state.values()]
    found = torch.cat([10 * moment.flatten() for moment in moments]).norm()  # (1 - beta1) = 1/10 of the gradient
    assert norm > 1.5 and found.item() == pytest.approx(used or norm, rel=1e-3)


def test_dropout_depends_on_seed_step_and_rows_only(batches, process_group):
    """Not on what torch drew before, nor on the number of ranks."""
    options = dict(micro_batch=4, dropout=0.5)
    whole = train(make_step(**options)[1], batches, [5])[0][0]
    torch.rand(7)
    assert train(make_step(**options)[1], batches, [5])[0][0] == whole
    inputs, targets = batches.batch(5)
    losses = []
    for rank, rows in enumerate((slice(0, 4), slice(4, 8))):
        _, take_step = make_step(ranks=Ranks(rank, 2, "cpu"), **options)
        losses.append(take_step(5, inputs[rows], targets[rows], 1e-2)[0].item())
    assert sum(losses) == pytest.approx(whole, rel=1e-6)
    masks = [(make_step(seed=seed, **options)[1], step) for seed in (1, 2) for step in (5, 6)]
    assert len({take_step(step, inputs, targets, 0.0)[0].item() for take_step, step in masks}) == 4


def test_prefetch_yields_the_rows_of_this_rank_in_order(batches):
    for rank in (0, 1):
        found = list(prefetch(batches, range(2, 9), Ranks(rank, 2, "cpu")))
        expected = [batches.batch(step, slice(4 * rank, 4 * rank + 4)) for step in range(2, 9)]
        assert equal(found, expected)


def test_prefetch_loads_in_one_thread_and_not_too_far_ahead(batches):
    loaded, threads, load = [], set(), batches.batch

    def load_and_record(step, rows):
        loaded.append(step)
        threads.add(threading.current_thread())
        return load(step, rows)

    batches.batch = load_and_record
    steps = prefetch(batches, iter(range(10**9)), ONE)
    for taken in range(1, 20):
        next(steps)
        assert taken <= len(loaded) <= taken + PREFETCHED
    (thread,) = threads
    assert thread.is_alive() and thread is not threading.main_thread()
    steps.close()
    assert not thread.is_alive() and loaded == list(range(taken + PREFETCHED))


def test_prefetch_raises_an_error_where_its_batch_would_have_come(batches):
    load, threads = batches.batch, set()

    def load_or_fail(step, rows):
        threads.add(threading.current_thread())
        if step == 3:
            raise OSError("no batch 3")
        return load(step, rows)

    batches.batch = load_or_fail
    steps = prefetch(batches, range(10), ONE)
    assert equal([next(steps) for _ in range(3)], [load(step) for step in range(3)])
    with pytest.raises(OSError, match="no batch 3"):
        next(steps)
    assert not any(thread.is_alive() for thread in threads)


def choose(micro_batch, saved=None, share=48, world=1, **options):
    config = Config(**SMALL | dict(batch_size=share * world, micro_batch=micro_batch) | options)
    return choose_micro_batch(None, config, Ranks(0, world, "cpu"), saved)


def test_micro_batch_of_a_new_run():
    assert [choose(0), choose(16), choose(48), choose(0, world=2)] == [48, 16, 48, 48]
    assert [choose("auto", share=share) for share in (8, 48, 60, 37)] == [8, 24, 30, 1]
    assert choose("auto", share=2 * CPU_MICRO_BATCH, world=3) == CPU_MICRO_BATCH
    for options in (dict(micro_batch=5), dict(micro_batch=96), dict(micro_batch=24, batch_size=72, world=2)):
        with pytest.raises(ValueError, match=f"micro_batch={options['micro_batch']}"):
            choose(**options)


def test_a_resumed_run_keeps_its_micro_batch():
    assert [choose("auto", saved=12), choose(0, saved=12), choose(0, saved=12, dropout=0.1)] == [12, 48, 12]
    assert choose("auto", saved=12, share=20) == 20  # it does not divide the share of another number of ranks
    for asked in (0, "auto"):
        with pytest.raises(ValueError, match=r"12.* 20 .*--micro_batch 20 --allow_changes"):
            choose(asked, saved=12, share=20, dropout=0.1)
    assert choose(4, saved=12, share=20, dropout=0.1) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures the memory of a GPU")
def test_micro_batch_auto_takes_the_largest_that_fits(monkeypatch):
    config = Config(**SMALL | dict(batch_size=64, micro_batch="auto", device="cuda", vocab_size=4096, attention="auto"))
    ranks, model = Ranks(0, 1, "cuda"), GPT(config.model(CharTokenizer("".join(map(chr, range(4096)))))).cuda()
    before = copy.deepcopy(model.state_dict())
    assert choose_micro_batch(model, config, ranks, None) == 64

    def limit(module, inputs):
        if len(inputs[0]) > 20:
            raise torch.OutOfMemoryError("20 sequences at most")

    hook = model.blocks[0].register_forward_pre_hook(limit)
    assert choose_micro_batch(model, config, ranks, None) == 16
    assert all(p.grad is None for p in model.parameters()) and equal(copy.deepcopy(model.state_dict()), before)
    monkeypatch.setattr(training_step, "MEMORY_RESERVE", 2)  # more than there is
    with pytest.raises(ValueError, match="not even a micro-batch of 1 fits"):
        choose_micro_batch(model, config, ranks, None)
    hook.remove()
    model.blocks[0].register_forward_pre_hook(lambda *_: 1 / 0)
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError):  # not taken for a lack of memory
        fits(model, 2, config, ranks)


def test_evaluation_is_the_mean_over_all_tokens_and_is_split_over_the_ranks(process_group):
    """17 windows in batches of 4: the last one is smaller, so the mean of the batches' losses would differ."""
    config, seen = Config(**SMALL | dict(dropout=0.5)), []
    model = GPT(config.model(SIXTEEN))
    model.head.weight.data *= 50  # losses that differ from batch to batch
    text = tokens(17 * 8 + 1)
    ids = torch.from_numpy(text.windows([0], len(text))[0].astype("int64"))
    inputs, targets = ids[:-1].view(17, 8), ids[1:].view(17, 8)
    with torch.no_grad():
        expected = model.eval()(inputs, targets).item()
        by_batch = [model(*batch).item() for batch in zip(inputs.split(4), targets.split(4), strict=True)]
    validation = validation_batches(text, block_size=8, batch_size=4)
    assert evaluate(model.train(), validation, config, ONE) == pytest.approx(expected, rel=1e-6) and model.training
    assert abs(sum(by_batch) / 5 - expected) > 1e-3 * expected
    model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    parts = [evaluate(model, validation, config, Ranks(rank, 2, "cpu")) for rank in (0, 1)]
    assert seen == [4, 4, 1, 4, 4, 1]  # the last one keeps the ranks in step and does not count
    assert (9 * parts[0] + 8 * parts[1]) / 17 == pytest.approx(expected, rel=1e-6)
