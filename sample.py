"""Generate text with a trained model, and print it token by token.

python sample.py                                        with the newest run
python sample.py --prompt "ROMEO:" --temperature 0.9    continue a text, or a file: --prompt FILE:path
"""

import codecs
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from model import Cache, require
from training.checkpoint import checkpoints, load_first, newest_run, restore_model
from training.config import parse_flags, resolve_device
from training.step import autocast


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    run: str = ""
    """Run folder (its best.pt is preferred) or checkpoint file; empty takes the newest run."""
    prompt: str = "\n"
    """Text to continue, or FILE:path of a UTF-8 file."""
    max_tokens: int = 500
    """Tokens per sample."""
    temperature: float = 0.8
    """Logits are divided by it; 0 always takes the most likely token."""
    top_k: int = 200
    """Sample from the k most likely tokens; 0 = all."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together reach this probability; 1 = all."""
    num_samples: int = 1
    stop: str = ""
    """End a sample before this text."""
    seed: int = 1337
    device: str = "auto"

    def __post_init__(self):
        for name, least in dict(max_tokens=1, num_samples=1, temperature=0, top_k=0).items():
            require(getattr(self, name) >= least, f"{name}={getattr(self, name)} must be at least {least}")
        require(0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]; 1 keeps all tokens")


def choose(logits, temperature, top_k, top_p, generator):
    """Draw one token per row of logits [B, V]; returns [B, 1]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # <= 0, so a tiny temperature cannot overflow
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probability = ordered.softmax(-1)
        before = probability.cumsum(-1) - probability  # of more likely tokens; the first token is always kept
        logits = torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(before >= top_p, float("-inf")))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


@torch.no_grad()
def next_logits(model, tokens, cache):
    """Logits [B, V] after tokens [B, T], of which the cache may hold a prefix; the context is the last block_size.

    Past block_size the context slides by one token, and the cache is filled anew: keys and values of all positions
    depended on the token that left.
    """
    block_size = model.config.block_size
    if tokens.shape[1] > block_size:
        tokens = tokens[:, -block_size:]
        cache.length = 0
    return model(tokens[:, cache.length :], cache=cache)[:, -1]


def generate(model, tokens, max_tokens, n_vocab, *, temperature=0.8, top_k=200, top_p=1.0, generator=None):
    """Yield max_tokens tokens [B, 1] that continue tokens [B, T >= 1]; all ids are below n_vocab."""
    kind = tokens.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else next(model.parameters()).dtype
    cache = Cache(model.config, tokens.shape[0], tokens.device, dtype)
    for _ in range(max_tokens):
        logits = next_logits(model, tokens, cache)[:, :n_vocab]
        token = choose(logits, temperature, top_k, top_p, generator)
        tokens = torch.cat((tokens, token), dim=1)
        yield token


def stream_text(tokens, tokenizer, stop):
    """Decode a stream of tokens into pieces of text: whole characters only, ending before the stop text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    held = ""
    for token in tokens:
        held += decoder.decode(tokenizer.decode_bytes([int(token)]))
        if stop and stop in held:
            yield held.split(stop)[0]
            return
        # hold back the longest end of the text with which the stop text may begin
        wait = next((n for n in range(min(len(stop) - 1, len(held)), 0, -1) if held.endswith(stop[:n])), 0)
        yield held[: len(held) - wait]
        held = held[len(held) - wait :]
    yield held + decoder.decode(b"", final=True)


def read_prompt(prompt):
    return Path(prompt[5:]).read_text(encoding="utf-8") if prompt.startswith("FILE:") else prompt


def load(run):
    """(GPT on the CPU, tokenizer, contents) of a run folder or checkpoint file; "" is the newest run."""
    path = Path(run) if run else newest_run()
    best = path / "best.pt"
    contents = load_first([best] * best.is_file() + checkpoints(path) or [path])
    return *restore_model(contents), contents


def main(config):
    device = resolve_device(config.device)
    model, tokenizer, contents = load(config.run)
    model.to(device).eval()
    prompt = read_prompt(config.prompt)
    ids = tokenizer.encode_ordinary(prompt)
    require(ids, "the prompt is empty; give at least one character, such as --prompt 'O'")
    print(f"{contents['path']} on {device}", file=sys.stderr)
    precision = autocast("auto", device)
    with precision, torch.no_grad():  # attention() prints its choice before the text begins
        model(torch.tensor([ids[-model.config.block_size :]], device=device))
    start, count = time.perf_counter(), 0
    for index in range(config.num_samples):
        generator = torch.Generator(device).manual_seed(config.seed + index)
        tokens = torch.tensor([ids], device=device)
        stream = generate(
            model, tokens, config.max_tokens, tokenizer.n_vocab, temperature=config.temperature, top_k=config.top_k,
            top_p=config.top_p, generator=generator,
        )  # fmt: skip
        print(prompt, end="", flush=True)
        with precision:
            for piece in stream_text(stream, tokenizer, config.stop):
                print(piece, end="", flush=True)
                count += 1
        print("" if index + 1 == config.num_samples else "\n---------------")
    print(f"{count / (time.perf_counter() - start):.0f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    try:
        main(parse_flags(SampleConfig, sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
