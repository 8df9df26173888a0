"""Time generation and decode(): one process, random weights of GPT-2 124M's shape, medians.

    python benchmarks/sampling.py                        all parts
    python benchmarks/sampling.py --transformers         also generate() of Hugging Face's GPT-2
    python benchmarks/sampling.py --nanogpt PATH         also generate() of a checkout of nanoGPT
    python benchmarks/sampling.py --parts attention      decode() against SDPA, in GB/s, beside the bandwidth of a copy
    python benchmarks/sampling.py --parts profile        GPU time of a token by kernel
    python benchmarks/sampling.py --small                sizes for a CPU, to try this script

Parts: text (new tokens per second with the time of the prompt, for all; without it, and the time to the first token of
a 1,000-token prompt, for ours), attention, profile, and start (seconds from `python sample.py` to its end after one
token). All of them sample with temperature 0.8 from the 200 most likely tokens. A graph's time does not include the
host's work, so calls of attention are timed as graphs too; they take turns over copies of the cache, more than the L2
cache can hold. Progress goes to standard error; the tables come last.
"""

import argparse
import contextlib
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))
from attention import decode
from data import make_tokenizer, to_state
from generation import Generator, Sampling
from generation.generate import to_bfloat16
from model import GPT, GPTConfig
from training.checkpoint import FORMAT, save_checkpoint

ROOT = Path(__file__).parents[1]
L2_BYTES = 2**28  # several times the L2 cache of any GPU


class Sizes(NamedTuple):
    model: dict
    batches: tuple
    prompt: int
    new: int
    long_prompt: int
    contexts: tuple
    repeats: int


GPT2 = Sizes(
    dict(vocab_size=50304, block_size=1024, n_layer=12, n_head=12, n_embd=768, bias=True),
    (1, 8, 64), 128, 512, 1000, (1024, 4096, 8192, 32_768, 131_072), 5,
)  # fmt: skip
SMALL = Sizes(
    dict(vocab_size=512, block_size=64, n_layer=2, n_head=4, n_embd=64, bias=True), (1, 4), 8, 16, 40, (64, 256), 2
)
HEADS = {"GPT-2": (12, 12, 64), "32 query and 8 key heads": (32, 8, 128), "32 query heads, 1 key head": (32, 1, 128)}


class Vocabulary(NamedTuple):
    """All that Generator.tokens() needs of a tokenizer."""

    n_vocab: int


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(function, device):
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def random_model(sizes, device):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**sizes.model)).eval()
    return (to_bfloat16(model) if device == "cuda" else model).to(device)


def prompts(batch, length, vocabulary):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocabulary, (batch, length), generator=generator)


def time_ours(sizes, batch, device):
    """Medians: new tokens per second with the time of the prompt, those after the first, seconds to the first token of
    the long prompt."""
    vocabulary = sizes.model["vocab_size"]
    generator = Generator(random_model(sizes, device), Vocabulary(vocabulary), batch)
    texts = prompts(batch, sizes.prompt, vocabulary).tolist()
    long_texts = prompts(1, sizes.long_prompt, vocabulary).tolist() * batch
    generator.warm_up()
    found = []
    for _ in range(1 + sizes.repeats):
        tokens = generator.tokens(texts, sizes.new)
        first = seconds(lambda tokens=tokens: next(tokens), device)
        rest = seconds(lambda tokens=tokens: list(tokens), device)
        long_first = seconds(lambda: next(generator.tokens(long_texts, 1)), device)
        found.append((batch * sizes.new / (first + rest), batch * (sizes.new - 1) / rest, long_first))
    return [statistics.median(values) for values in zip(*found[1:], strict=True)]  # the first run warms up


def time_generate(make, sizes, batch, device):
    """New tokens per second, with the time of the prompt, of what make() returns: generate(prompts, new tokens)."""
    generate = make(sizes, device)
    given = prompts(batch, sizes.prompt, sizes.model["vocab_size"]).to(device)
    generate(given, 8)  # to warm up
    return batch * sizes.new / seconds(lambda: generate(given, sizes.new), device)  # once: it takes seconds


def transformers_generate(sizes, device):
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = sizes.model
    config = GPT2Config(
        vocab_size=shape["vocab_size"], n_positions=shape["block_size"], n_embd=shape["n_embd"],
        n_layer=shape["n_layer"], n_head=shape["n_head"], eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = GPT2LMHeadModel(config).to(device, dtype).eval()

    def generate(given, new):
        options = dict(do_sample=True, top_k=200, temperature=0.8, pad_token_id=0)
        return model.generate(given, max_new_tokens=new, min_new_tokens=new, **options)

    return generate


def nanogpt_generate(path):
    """make() of time_generate() for a checkout of nanoGPT, loaded by path because its model.py has the name of ours."""

    def make(sizes, device):
        spec = importlib.util.spec_from_file_location("nanogpt", Path(path) / "model.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt"] = module
        spec.loader.exec_module(module)
        model = module.GPT(module.GPTConfig(**sizes.model, dropout=0.0)).to(device).eval()
        cast = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext()

        def generate(given, new):
            with torch.no_grad(), cast:
                return model.generate(given, new, temperature=0.8, top_k=200)

        return generate

    return make


def text_part(sizes, device, others):
    names = ["batch", "Kestrel tokens/s", *others, "Kestrel without the prompt", "first token, ms"]
    yield f"prompt {sizes.prompt}, {sizes.new} new tokens; first token of a prompt of {sizes.long_prompt:,}"
    yield row(names)
    yield row(["---"] * len(names))
    for batch in sizes.batches:
        whole, rest, first = time_ours(sizes, batch, device)
        rates = [time_generate(make, sizes, batch, device) for make in others.values()]
        yield row([batch, *(f"{rate:,.0f}" for rate in (whole, *rates, rest)), f"{1000 * first:.1f}"])


def row(cells):
    return f"| {' | '.join(map(str, cells))} |"


def graph_seconds(calls, device, repeats=20):
    """Median seconds of one of the calls, which run one after the other in one CUDA graph."""
    if device == "cpu":
        return statistics.median(seconds(lambda: [call() for call in calls], device) for _ in range(3)) / len(calls)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    spent = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    return statistics.median(spent) / 1000 / len(calls)


def sdpa(backend, q, k, v):
    with sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def copy_bandwidth(device):
    """GB/s, read and written."""
    source = torch.empty(2**30 if device == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / graph_seconds([lambda: target.copy_(source)], device) / 1e9


@torch.no_grad()
def attention_part(sizes, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    copy = copy_bandwidth(device)
    names = ["heads", "batch", "context", "decode() GB/s", "of copy", "SDPA flash", "SDPA cuDNN"]
    yield f"a copy reads and writes {copy:,.0f} GB/s"
    yield row(names)
    yield row(["---"] * len(names))
    for (name, shape), batch, context in itertools.product(HEADS.items(), (1, 8), sizes.contexts):
        rates = attention_rates(batch, context, *shape, dtype, device)
        ours, *others = (f"{rate:,.0f}" if rate else "-" for rate in rates)
        yield row([name, batch, f"{context:,}", ours, f"{rates[0] / copy:.0%}", *others])


def attention_rates(batch, context, heads, kv_heads, dim, dtype, device):
    """GB/s at which decode(), SDPA flash and SDPA cuDNN read the cache; 0 if a backend does not serve this call."""
    size = 2 * batch * context * kv_heads * dim * dtype.itemsize
    copies = range(min(64, 1 + L2_BYTES // size) if device == "cuda" else 1)
    q = torch.randn(batch, 1, heads, dim, device=device, dtype=dtype)
    caches = [torch.randn(2, batch, context, kv_heads, dim, device=device, dtype=dtype) for _ in copies]
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    rates = []
    for call in (
        lambda k, v: decode(q, k, v, lengths),
        lambda k, v: sdpa(SDPBackend.FLASH_ATTENTION, q, k, v),
        lambda k, v: sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v),
    ):
        try:
            spent = graph_seconds([lambda c=c, call=call: call(*c) for c in caches], device)
            rates.append(size / spent / 1e9)
        except RuntimeError:
            rates.append(0)
    return rates


def profile_part(sizes, device):
    """GPU microseconds of a step by kernel, at the smallest and the largest batch; the rest of its time is gaps."""
    if device == "cpu":
        return
    from torch.profiler import ProfilerActivity, profile

    vocabulary = sizes.model["vocab_size"]
    for batch in (sizes.batches[0], sizes.batches[-1]):
        generator = Generator(random_model(sizes, device), Vocabulary(vocabulary), batch)
        texts = prompts(batch, sizes.prompt, vocabulary).tolist()
        list(generator.tokens(texts, 16))
        tokens, count = generator.tokens(texts, sizes.new), sizes.new - 1
        next(tokens)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            whole = seconds(lambda tokens=tokens: list(tokens), device)
        events = sorted(recorded.key_averages(), key=lambda event: -event.self_device_time_total)
        busy = sum(event.self_device_time_total for event in events)
        yield f"batch {batch}: a step takes {1e6 * whole / count:.0f} us, its kernels {busy / count:.0f} us"
        yield "calls and microseconds a step by kernel:"
        for event in events[:20]:
            yield f"{event.count / count:6.1f} {event.self_device_time_total / count:8.1f}  {event.key[:80]}"


def start_part(sizes, device):
    with tempfile.TemporaryDirectory() as folder:
        path, config = Path(folder) / "best.pt", sizes.model
        tokenizer = to_state(make_tokenizer("bytes", ""))
        weights = GPT(GPTConfig(**config)).state_dict()
        save_checkpoint(path, dict(format=FORMAT, model=weights, model_config=config, tokenizer=tokenizer, step=0))
        command = [sys.executable, ROOT / "sample.py", "--run", path, "--device", device, "--max_tokens", "1"]
        options = dict(check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
        spent = [seconds(lambda: subprocess.run(list(map(str, command)), **options), "cpu") for _ in range(2)]
    yield f"start of sample.py to its end after one token: {spent[0]:.1f} s, then {spent[1]:.1f} s"


PARTS = {"text": text_part, "attention": attention_part, "profile": profile_part, "start": start_part}


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--transformers", action="store_true", help="also time Hugging Face's GPT-2")
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT, timed in the same process")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    args = parser.parse_args(argv)
    device, sizes = "cuda" if torch.cuda.is_available() else "cpu", SMALL if args.small else GPT2
    chip = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    tables = [f"{chip}, torch {torch.__version__}, commit {commit.strip()}, {Sampling()}"]
    others = {"transformers": transformers_generate} if args.transformers else {}
    if args.nanogpt:
        others["nanoGPT"] = nanogpt_generate(args.nanogpt)
    start = time.perf_counter()
    for name in args.parts:
        tables.append("")
        part = PARTS[name](sizes, device, *[others] * (name == "text"))
        try:
            for line in part:
                tables.append(line)
                print(f"{time.perf_counter() - start:4.0f} s  {name}: {line}", file=sys.stderr, flush=True)
        except Exception:  # the other parts still count
            traceback.print_exc()
            tables.append(f"{name}: failed")
    print("\n".join(tables))


if __name__ == "__main__":
    main(sys.argv[1:])
