"""Time generation and decode(): one process, random weights of GPT-2 124M and of configs/modern.py, medians.

    python benchmarks/sampling.py                        all parts
    python benchmarks/sampling.py --parts text --transformers --nanogpt PATH    beside their generate()
    python benchmarks/sampling.py --parts attention      decode() against SDPA, in GB/s
    python benchmarks/sampling.py --small                sizes for a CPU, to try this script

Parts: text (new tokens per second with the time of the prompt; without it, and the time to the first token of a
1,000-token prompt, for ours) and attention. All sample with temperature 0.8 from the 200 most likely tokens. Calls of
attention are timed as CUDA graphs, without the host's work, over copies of the cache, more than the L2 cache can hold.
"""

import itertools
import statistics
from functools import partial
from runpy import run_path
from types import SimpleNamespace

import torch
from harness import DEVICE, ROOT, command_line, sdpa, seconds_of, table
from torch.nn.attention import SDPBackend
from triton.testing import do_bench_cudagraph

from attention import decode
from generation import Generator
from model import GPT, GPTConfig
from weights import to_bfloat16

L2_BYTES = 2**28  # several times the L2 cache of any GPU
ON_GPU = DEVICE == "cuda"
DTYPE = torch.bfloat16

# prompt, long_prompt, new: tokens. contexts: of decode(). repeats: of generation.
GPT2 = SimpleNamespace(
    model=dict(vocab_size=50304, block_size=1024, n_layer=12, n_head=12, n_embd=768, bias=True), batches=(1, 8, 64),
    prompt=128, long_prompt=1000, new=128, contexts=(1024, 4096, 8192, 32_768, 131_072), repeats=3,
)  # fmt: skip
SMALL = SimpleNamespace(
    model=dict(vocab_size=512, block_size=64, n_layer=2, n_head=4, n_embd=64, bias=True), batches=(1, 4),
    prompt=8, long_prompt=40, new=16, contexts=(64, 256), repeats=2,
)  # fmt: skip
HEADS = {
    "GPT-2: 12 of 64": (12, 12, 64), "32 query, 8 key, of 128": (32, 8, 128), "32 query, 1 key, of 128": (32, 1, 128)
}  # fmt: skip


def recipe(sizes):
    """Options of configs/modern.py's network with as many layers and tokens as the other one."""
    shape, found = sizes.model, run_path(f"{ROOT}/configs/modern.py")
    found |= found["dial"](shape["n_layer"], 36e6, found["block_size"], None, None, None, shape["vocab_size"], 1e12)
    return {name: found[name] for name in found.keys() & GPTConfig.__dataclass_fields__}


def prompts(sizes, batch, length):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(sizes.model["vocab_size"], (batch, length), generator=generator)


def time_ours(sizes, options, batch):
    """Medians: new tokens per second with and without the prompt's time, seconds to the long prompt's first token."""
    model = to_bfloat16(GPT(GPTConfig(**options))).to(DEVICE).eval()
    tokenizer = SimpleNamespace(n_vocab=sizes.model["vocab_size"])  # tokens() needs no more of it
    generator = Generator(model, tokenizer, batch)
    texts = prompts(sizes, batch, sizes.prompt).tolist()
    long_texts = prompts(sizes, batch, sizes.long_prompt).tolist()
    generator.warm_up()
    found = []
    for _ in range(1 + sizes.repeats):
        tokens = generator.tokens(texts, sizes.new)
        first = seconds_of(partial(next, tokens))
        rest = seconds_of(partial(list, tokens))
        long_first = seconds_of(lambda: next(generator.tokens(long_texts, 1)))
        found.append((batch * sizes.new / (first + rest), batch * (sizes.new - 1) / rest, long_first))
    return [statistics.median(values) for values in zip(*found[1:], strict=True)]  # the first run warms up


def time_generate(generate, sizes, batch):
    """Median of new tokens per second, with the time of the prompt, of generate(prompts, new tokens)."""
    given = prompts(sizes, batch, sizes.prompt).to(DEVICE)
    seconds = [seconds_of(partial(generate, given, sizes.new)) for _ in range(1 + sizes.repeats)]
    return batch * sizes.new / statistics.median(seconds[1:])  # the first run warms up


def transformers_generate(sizes, **options):
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = sizes.model
    config = GPT2Config(
        vocab_size=shape["vocab_size"], n_positions=shape["block_size"], n_embd=shape["n_embd"],
        n_layer=shape["n_layer"], n_head=shape["n_head"], eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(DEVICE, DTYPE).eval()

    def generate(given, new):
        choice = dict(do_sample=True, top_k=200, temperature=0.8, pad_token_id=0)
        return model.generate(given, max_new_tokens=new, **choice, **options)

    return generate


def nanogpt_generate(path, sizes):
    """generate() of a checkout of nanoGPT, whose model.py is run because it has the name of ours."""
    nanogpt = run_path(f"{path}/model.py")
    model = nanogpt["GPT"](nanogpt["GPTConfig"](**sizes.model, dropout=0.0)).to(DEVICE).eval()

    def generate(given, new):
        with torch.no_grad(), torch.autocast(DEVICE, DTYPE):
            return model.generate(given, new, temperature=0.8, top_k=200)

    return generate


def text_rows(sizes, others):
    networks = ("GPT-2", sizes.model, others.values()), ("configs/modern.py", recipe(sizes), ())
    for (name, options, rivals), batch in itertools.product(networks, sizes.batches):
        whole, rest, first = time_ours(sizes, options, batch)
        rates = [f"{time_generate(rival, sizes, batch):,.0f}" for rival in rivals] or ["-"] * len(others)
        yield [name, batch, f"{whole:,.0f}", *rates, f"{rest:,.0f}", f"{1000 * first:.1f}"]


def graph_seconds(calls):
    """Median seconds of one of the calls, which run one after the other in one CUDA graph."""

    def call_all():
        for call in calls:
            call()

    if not ON_GPU:
        return seconds_of(call_all) / len(calls)
    return do_bench_cudagraph(call_all, rep=100, return_mode="median") / 1000 / len(calls)


@torch.no_grad()
def attention_rows(sizes):
    """GB/s at which decode(), SDPA flash and SDPA cuDNN read the cache; - if a backend does not serve this call."""
    for (name, (heads, kv_heads, dim)), batch, context in itertools.product(HEADS.items(), (1, 8), sizes.contexts):
        size = 2 * batch * context * kv_heads * dim * DTYPE.itemsize
        copies = min(64, 1 + L2_BYTES // size) if ON_GPU else 1
        q = torch.randn(batch, 1, heads, dim, device=DEVICE, dtype=DTYPE)
        caches = torch.randn(copies, 2, batch, context, kv_heads, dim, device=DEVICE, dtype=DTYPE)
        lengths = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
        ours = partial(decode, q, lengths=lengths)
        flash = partial(sdpa, SDPBackend.FLASH_ATTENTION, q)
        cudnn = partial(sdpa, SDPBackend.CUDNN_ATTENTION, q)
        rates = []
        for call in (ours, flash, cudnn):
            try:
                rates.append(f"{size / graph_seconds([partial(call, *cache) for cache in caches]) / 1e9:,.0f}")
            except RuntimeError:
                rates.append("-")
        yield [name, batch, f"{context:,}", *rates]


def main():
    parser = command_line(__doc__)
    parser.add_argument("--parts", nargs="+", default=["text", "attention"], choices=["text", "attention"])
    parser.add_argument("--transformers", action="store_true", help="also time Hugging Face's GPT-2")
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT, timed in the same process")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    args = parser.parse_args()
    sizes, others = SMALL if args.small else GPT2, {}
    if args.transformers:
        from transformers import CompileConfig, __version__

        compiled = CompileConfig(dynamic=False)  # anew for each batch size, for tensors of known shape
        others[f"Transformers {__version__}"] = transformers_generate(sizes)
        static = transformers_generate(sizes, cache_implementation="static", compile_config=compiled)
        others["Transformers, static cache"] = static
    if args.nanogpt:
        others["nanoGPT"] = nanogpt_generate(args.nanogpt, sizes)
    if "text" in args.parts:
        head = ["network", "batch", "Kestrel tokens/s", *others, "Kestrel without the prompt", "first token, ms"]
        table(head, text_rows(sizes, others))
    if "attention" in args.parts:
        head = ["heads", "batch", "context", "decode() GB/s", "SDPA flash", "SDPA cuDNN"]
        table(head, attention_rows(sizes))


if __name__ == "__main__":
    main()
