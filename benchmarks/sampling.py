"""Time generation and decode(): one process, random weights of GPT-2 124M's shape, medians.

    python benchmarks/sampling.py                        all parts, with transformers if it is installed
    python benchmarks/sampling.py --nanogpt PATH         also generate() of a checkout of nanoGPT
    python benchmarks/sampling.py --parts attention      decode() against SDPA, in GB/s, beside the bandwidth of a copy
    python benchmarks/sampling.py --parts profile        GPU time of a token by kernel
    python benchmarks/sampling.py --small                sizes for a CPU, to try this script

Parts: text (tokens per second after the first, and the time to the first token of a 1,000-token prompt), attention,
profile, and start (seconds from `python sample.py` to its end after one token, the second time it is run). All of them
sample with temperature 0.8 from the 200 most likely tokens. A graph's time does not include the host's work, so calls
of attention are timed as graphs too; they take turns over copies of the cache that do not fit into the L2 cache.
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
PARTS = ("text", "attention", "profile", "start")
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
    """(tokens per second after the first token, seconds to the first token of the long prompt), medians."""
    vocabulary = sizes.model["vocab_size"]
    generator = Generator(random_model(sizes, device), Vocabulary(vocabulary), batch)
    texts = prompts(batch, sizes.prompt, vocabulary).tolist()
    long_texts = prompts(1, sizes.long_prompt, vocabulary).tolist() * batch
    rates, firsts = [], []
    for _ in range(sizes.repeats):
        tokens = generator.tokens(texts, sizes.new)
        next(tokens)
        rates.append(batch * (sizes.new - 1) / seconds(lambda tokens=tokens: list(tokens), device))
        synchronize(device)
        firsts.append(seconds(lambda: next(generator.tokens(long_texts, 1)), device))
    return statistics.median(rates[1:]), statistics.median(firsts[1:])


def time_generate(make, sizes, batch, device):
    """Tokens per second of another implementation: make() returns generate(prompts, new tokens)."""
    generate = make(sizes, device)
    given = prompts(batch, sizes.prompt, sizes.model["vocab_size"]).to(device)
    generate(given, 8)  # to warm up
    spent = [seconds(lambda: generate(given, sizes.new), device) for _ in range(max(2, sizes.repeats - 2))]
    return batch * sizes.new / statistics.median(spent)


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
    """Maker of generate() of a checkout of nanoGPT, which is not on the import path: its files have our names."""

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


def text_part(sizes, device, nanogpt):
    others = {"transformers": transformers_generate} if importlib.util.find_spec("transformers") else {}
    if nanogpt:
        others["nanoGPT"] = nanogpt_generate(nanogpt)
    print(f"| batch | Kestrel tokens/s | first token of {sizes.long_prompt:,}, ms | {' | '.join(others)} |")
    for batch in sizes.batches:
        rate, first = time_ours(sizes, batch, device)
        rates = [f"{time_generate(make, sizes, batch, device):,.0f}" for make in others.values()]
        print(f"| {batch} | {rate:,.0f} | {1000 * first:.1f} | {' | '.join(rates)} |", flush=True)


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
    print(f"\ncopy {copy:,.0f} GB/s\n| heads | batch | context | decode() GB/s | of copy | SDPA flash | SDPA cuDNN |")
    for name, (heads, kv_heads, dim) in HEADS.items():
        for batch in (1, 8):
            for context in sizes.contexts:
                size = 2 * batch * context * kv_heads * dim * dtype.itemsize
                if size > 2**34:
                    continue
                copies = range(min(64, 1 + L2_BYTES // size) if device == "cuda" else 1)
                q = torch.randn(batch, 1, heads, dim, device=device, dtype=dtype)
                caches = [torch.randn(2, batch, context, kv_heads, dim, device=device, dtype=dtype) for _ in copies]
                lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
                rates = []
                for call in (
                    lambda k, v, q=q, lengths=lengths: decode(q, k, v, lengths),
                    lambda k, v, q=q: sdpa(SDPBackend.FLASH_ATTENTION, q, k, v),
                    lambda k, v, q=q: sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v),
                ):
                    try:
                        spent = graph_seconds([lambda c=c, call=call: call(*c) for c in caches], device)
                        rates.append(size / spent / 1e9)
                    except RuntimeError:  # the backend does not serve this call
                        rates.append(float("nan"))
                row = [f"{rates[0]:,.0f}", f"{rates[0] / copy:.0%}", *(f"{rate:,.0f}" for rate in rates[1:])]
                print(f"| {name} | {batch} | {context:,} | {' | '.join(row)} |", flush=True)


def profile_part(sizes, device):
    """GPU microseconds of a token by kernel, batch 1; the rest of its time are gaps."""
    if device == "cpu":
        return
    from torch.profiler import ProfilerActivity, profile

    vocabulary = sizes.model["vocab_size"]
    generator = Generator(random_model(sizes, device), Vocabulary(vocabulary))
    texts = prompts(1, sizes.prompt, vocabulary).tolist()
    list(generator.tokens(texts, 16))
    tokens, count = generator.tokens(texts, sizes.new), sizes.new - 1
    next(tokens)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        whole = seconds(lambda: list(tokens), device)
    print(f"\n{1e6 * whole / count:.0f} us a token; calls and microseconds a token by kernel:")
    for event in sorted(recorded.key_averages(), key=lambda event: -event.self_device_time_total)[:25]:
        print(f"{event.count / count:6.1f} {event.self_device_time_total / count:8.1f}  {event.key[:90]}")


def start_part(sizes, device):
    with tempfile.TemporaryDirectory() as folder:
        path, config = Path(folder) / "best.pt", sizes.model
        tokenizer = to_state(make_tokenizer("bytes", ""))
        weights = GPT(GPTConfig(**config)).state_dict()
        save_checkpoint(path, dict(format=FORMAT, model=weights, model_config=config, tokenizer=tokenizer, step=0))
        command = [sys.executable, ROOT / "sample.py", "--run", path, "--device", device, "--max_tokens", "1"]
        options = dict(check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
        spent = [seconds(lambda: subprocess.run(list(map(str, command)), **options), "cpu") for _ in range(2)]
    print(f"\nstart of sample.py to its end after one token: {spent[0]:.1f} s, then {spent[1]:.1f} s")


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT, timed in the same process")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    args = parser.parse_args(argv)
    device, sizes = "cuda" if torch.cuda.is_available() else "cpu", SMALL if args.small else GPT2
    chip = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    print(f"{chip}, torch {torch.__version__}, commit {commit.strip()}, {Sampling()}")
    if "text" in args.parts:
        text_part(sizes, device, args.nanogpt)
    if "attention" in args.parts:
        attention_part(sizes, device)
    if "profile" in args.parts:
        profile_part(sizes, device)
    if "start" in args.parts:
        start_part(sizes, device)


if __name__ == "__main__":
    main(sys.argv[1:])
