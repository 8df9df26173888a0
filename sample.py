"""Write text with a trained model, streaming it as it is made.

python sample.py                                        from the newest run
python sample.py --prompt "ROMEO:" --temperature 0.9    from a text, or --prompt FILE:path
"""

import codecs
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint import checkpoints, first_good, load_checkpoint, newest_run, restore_model
from config import check_finite, fail, read_flags, resolve_device, resolve_dtype
from model import Cache


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    run: str = ""
    """Run folder, or a checkpoint file; empty takes the newest run. Of a folder, best.pt is preferred."""
    prompt: str = "\n"
    """Text to go on from, or FILE:path of a UTF-8 file."""
    max_tokens: int = 500
    """Tokens per sample."""
    temperature: float = 0.8
    """Logits are divided by it; 0 always takes the likeliest token."""
    top_k: int = 200
    """Sample among the k likeliest tokens; 0 = all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together reach this probability; 1 = all."""
    num_samples: int = 1
    stop: str = ""
    """End a sample before this text."""
    seed: int = 1337
    device: str = "auto"

    def __post_init__(self):
        check_finite(self)
        if self.max_tokens < 1 or self.num_samples < 1:
            raise ValueError(f"max_tokens={self.max_tokens} and num_samples={self.num_samples} must be at least 1")
        if self.temperature < 0 or self.top_k < 0:
            raise ValueError(f"temperature={self.temperature} and top_k={self.top_k} must not be negative")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1 keeps all tokens")


def choose(logits, temperature, top_k, top_p, generator):
    """Draw one token per row of logits [B, V] -> [B, 1]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0, so that a tiny temperature is safe
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probability = ordered.softmax(-1)
        before = probability.cumsum(-1) - probability  # of likelier tokens; the first is always kept
        logits = torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(before >= top_p, float("-inf")))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


@torch.no_grad()
def next_logits(model, tokens, cache):
    """Logits [B, V] after tokens [B, T], of which the cache may hold a prefix; the context is the last block_size.

    When the context is full it slides by one token. Every position's state then depends on a token that left, so the
    cache is filled anew: cached and uncached logits agree everywhere.
    """
    block_size = model.config.block_size
    if tokens.shape[1] > block_size:
        tokens = tokens[:, -block_size:]
        cache.length = 0
    return model(tokens[:, cache.length :], cache=cache)[:, -1]


def generate(model, tokens, max_tokens, n_vocab, *, temperature=0.8, top_k=200, top_p=1.0, generator=None):
    """Yield max_tokens tokens [B, 1] that follow tokens [B, T >= 1]; never an id past n_vocab (a padded vocabulary)."""
    kind = tokens.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else next(model.parameters()).dtype
    cache = Cache(model.config, tokens.shape[0], tokens.device, dtype)
    for _ in range(max_tokens):
        logits = next_logits(model, tokens, cache)[:, :n_vocab]
        token = choose(logits, temperature, top_k, top_p, generator)
        tokens = torch.cat((tokens, token), dim=1)
        yield token


def stream_text(tokens, tokenizer, stop):
    """Text pieces of a stream of tokens, once they are certain: whole characters, and no part of the stop text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    held = ""
    for token in tokens:
        held += decoder.decode(tokenizer.decode_bytes([int(token)]))
        if stop and stop in held:
            yield held.split(stop)[0]
            return
        # the longest end of the text that may be a beginning of the stop text waits
        wait = next((n for n in range(min(len(stop) - 1, len(held)), 0, -1) if held.endswith(stop[:n])), 0)
        yield held[: len(held) - wait]
        held = held[len(held) - wait :]
    yield held + decoder.decode(b"", final=True)


def read_prompt(prompt):
    if not prompt.startswith("FILE:"):
        return prompt
    path = Path(prompt.removeprefix("FILE:"))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt file {path} cannot be read as UTF-8 text ({error}); name another one") from error


def find_checkpoint(run):
    """The checkpoint file that --run names: itself, or the first good one of best.pt and the others in the folder."""
    path = Path(run) if run else newest_run()
    best = path / "best.pt"
    paths = [best] * best.is_file() + checkpoints(path)
    return first_good(paths)[0] if paths else path


def main(config):
    device = resolve_device(config.device)
    path = find_checkpoint(config.run)
    model, tokenizer = restore_model(load_checkpoint(path), path)
    model.to(device).eval()
    prompt = read_prompt(config.prompt)
    ids = tokenizer.encode_ordinary(prompt)
    if not ids:
        raise ValueError("the prompt is empty; give at least one character, such as --prompt 'O'")
    print(f"{path} on {device}", file=sys.stderr)
    dtype = resolve_dtype("auto", device)
    autocast = nullcontext() if dtype == torch.float32 else torch.autocast("cuda", dtype)
    with autocast, torch.no_grad():  # attention() says what serves before the text begins
        model(torch.tensor([ids[-model.config.block_size :]], device=device))
    start, count = time.perf_counter(), 0
    for index in range(config.num_samples):
        generator = torch.Generator(device).manual_seed(config.seed + index)
        tokens = torch.tensor([ids], device=device)
        stream = generate(
            model, tokens, config.max_tokens, tokenizer.n_vocab, temperature=config.temperature, top_k=config.top_k,
            top_p=config.top_p, generator=generator,
        )  # fmt: skip
        sys.stdout.write(prompt)
        with autocast:
            for piece in stream_text(stream, tokenizer, config.stop):
                sys.stdout.write(piece)
                sys.stdout.flush()
                count += 1
        sys.stdout.write("\n" if index + 1 == config.num_samples else "\n---------------\n")
    print(f"{count / (time.perf_counter() - start):.0f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    try:
        main(SampleConfig(**read_flags(SampleConfig, sys.argv[1:])))
    except (ValueError, OSError) as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
