"""Generate text with a trained model, and print it token by token.

python sample.py                                        with the newest run
python sample.py --prompt "ROMEO:" --temperature 0.9    continue a text, a file (FILE:path) or standard input (-)
python sample.py --interactive                          continue what you type; Ctrl-C stops a text, Ctrl-D ends

In Python:

    from sample import generate, load

    model, tokenizer, _ = load("runs/shakespeare")
    for piece in generate(model, tokenizer, "ROMEO:"):
        print(piece, end="", flush=True)
"""

import io
import itertools
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from data import end_of_text
from generation import Generator, Sampling, generate, generate_batch
from generation.generate import to_bfloat16
from model import require
from training.config import parse_flags, resolve_device, resolve_dtype
from training.weights import load_model

__all__ = ["generate", "generate_batch", "load"]

NEW_TEXT = "\n"  # the default prompt


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Sampling):
    """Options of sample.py."""

    run: str = ""
    """Run folder (its best.pt is preferred), checkpoint file, Hugging Face folder or its .safetensors file, or gpt2,
    gpt2-medium, gpt2-large, gpt2-xl; empty takes the newest run."""
    prompt: str = NEW_TEXT
    """Text to continue, FILE:path of a UTF-8 file, or - for standard input. The default, a line break, begins a text:
    if the tokenizer has an end-of-text token, the model reads that token instead."""
    interactive: bool = False
    """Continue lines that you type: Ctrl-C stops a text, Ctrl-D ends."""
    max_tokens: int = 500
    """Tokens per sample."""
    num_samples: int = 1
    """Samples, made in one batch."""
    stop: tuple[str, ...] = ()
    """End a sample before any of these texts."""
    ignore_eot: bool = False
    """Do not end a sample at the end-of-text token."""
    seed: int = 1337
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU), cpu, cuda, cuda:1, mps."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("max_tokens", "num_samples"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        require(
            not self.interactive or self.num_samples == 1,
            f"num_samples={self.num_samples} does not go with --interactive; leave it out",
        )
        require(
            not self.interactive or self.prompt == NEW_TEXT,
            "--prompt does not go with --interactive; type the prompt after the start",
        )


def load(run="", device="auto", dtype="auto"):
    """(GPT for generation, tokenizer, contents of the checkpoint or, for a Hugging Face model, {"path"}).

    Args:
        run: as of training.weights.read(); "" is the newest run. device: auto, cpu, cuda, cuda:N or mps.
        dtype: of the weights, float32 or bfloat16; auto takes bfloat16 on a GPU that has it.

    Raises:
        ValueError: there is no run or checkpoint, it is damaged, or the device does not exist. OSError: no such file.
    """
    device = resolve_device(device)
    model, tokenizer, contents = load_model(run)
    if resolve_dtype(dtype, device) == torch.bfloat16:
        to_bfloat16(model)
    return model.to(device).eval(), tokenizer, contents


def read_prompt(prompt):
    """The text that --prompt gives or names."""
    name = prompt.removeprefix("FILE:")
    require(name or not prompt, "--prompt FILE: names no file; give its path, such as FILE:start.txt")
    try:
        if prompt == "-":
            name = "standard input"
            return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8").read()
        return prompt if name == prompt else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not UTF-8 text; convert it first") from None


def show(text):
    print(text, end="", flush=True)


def print_samples(generator, prompt, config):
    """Print the first sample as it is made, then the others."""
    prompts, others = [prompt] * config.num_samples, [""] * config.num_samples
    pieces = generator.stream(prompts, config.max_tokens, config.stop, config.ignore_eot)  # it checks the prompt
    show(prompt)
    for number, piece in pieces:
        if number == 0:
            show(piece)
        else:
            others[number] += piece
    print()
    for text in others[1:]:
        print(f"---------------\n{prompt}{text}")


def print_speed(generator):
    """Tokens per second of the last batch. The prompt's include the choice of the first new token."""
    rates = []
    for name, count, seconds in (
        ("prompt", generator.prompt_tokens, generator.prompt_seconds),
        ("text", generator.new_tokens, generator.new_seconds),
    ):
        if count:
            rates.append(f"{name} {count:,} tokens in {seconds:.3f} s, {count / seconds:,.0f} tokens/s")
    print("; ".join(rates), file=sys.stderr)


def interact(generator, config):
    """Continue each line that is typed, with other random numbers each time."""
    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401, it gives input() its history
    generator.warm_up()
    for number in itertools.count():
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        try:
            generator.reseed((config.seed + number) % 2**62)
            print_samples(generator, prompt, config)
            print_speed(generator)
        except KeyboardInterrupt:
            print()
        except torch.OutOfMemoryError as error:
            print(f"error: {str(error).split('. ')[0]}; type a shorter prompt", file=sys.stderr)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)


def main(config):
    prompt = "" if config.interactive else read_prompt(config.prompt)
    model, tokenizer, contents = load(config.run, config.device)
    print(f"{contents['path']} on {model.embed.weight.device}", file=sys.stderr)
    sampling = Sampling(**{field.name: getattr(config, field.name) for field in fields(Sampling)})
    if prompt == NEW_TEXT and end_of_text(tokenizer) is not None:
        prompt = ""
    generator = Generator(model, tokenizer, config.num_samples, sampling, config.seed)
    if config.interactive:
        interact(generator, config)
    else:
        print_samples(generator, prompt, config)
        print_speed(generator)


if __name__ == "__main__":
    try:
        main(parse_flags(SampleConfig, sys.argv[1:]))
    except torch.OutOfMemoryError as error:
        sys.exit(f"error: {str(error).split('. ')[0]}; take fewer --num_samples or a shorter --prompt")
    except BrokenPipeError:  # the reader of standard output, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes there once more when it ends
        sys.exit(1)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
