"""Generate text with a trained model, and print it token by token.

python sample.py                                        with the newest run; sample.py NAME takes runs/NAME
python sample.py --prompt "ROMEO:" --temperature 0.9    continue a text, a file (FILE:path) or standard input (-)
python sample.py --interactive                          continue what you type
python sample.py --chat                                 answer it: see configs/chat.py

In Python:

    from sample import generate, load

    model, tokenizer, _ = load("runs/shakespeare")
    for piece in generate(model, tokenizer, "ROMEO:"):
        print(piece, end="", flush=True)

A list of messages in place of the text, such as [{"role": "user", "content": "Hello!"}], is a conversation.
"""

from errors import UserError, command, fold, require, start_command

if __name__ == "__main__":
    start_command("PyTorch")

import itertools
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from data.documents import RECORDS, read_text, suffix_of
from flags import parse_flags
from generation import Chat, Generator, Sampling, generate, generate_batch
from generation.chat import HELP
from generation.text import marked, opening
from weights import load

__all__ = ["generate", "generate_batch", "load"]


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Sampling):
    """python sample.py [RUN] [--option value ...]"""

    run: Annotated[str, tyro.conf.Positional] = ""
    """NAME of runs/NAME or a run's folder (its best.pt is preferred), checkpoint file, Hugging Face folder or its
    .safetensors file, or gpt2, gpt2-medium, gpt2-large, gpt2-xl (OpenAI's); the default is the newest run."""
    prompt: str = ""
    """Text to continue, FILE:path of a UTF-8 file, perhaps compressed, or - for standard input. The default begins a
    text: with the end-of-text token, else a line break, or the tokenizer's first character if it has neither."""
    interactive: bool = False
    """Continue lines that you type; an empty one begins a text. Ctrl-C stops a text; exit or Ctrl-D ends."""
    chat: bool = False
    """Answer what you type, as a model of configs/chat.py does. /system TEXT begins a new conversation with this system
    message, /reset one with the same message as before. If the context is full, the oldest turns are left out."""
    max_tokens: int = 500
    """Tokens per sample. Once they fill the context (block_size), the model reads only its newest half."""
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
        typed = self.interactive + self.chat
        alone = self.num_samples == 1 and not self.prompt
        rule = "--prompt and --num_samples do not go with --interactive and --chat; type prompts after the start"
        require(typed < 2, "--interactive continues texts and --chat answers them; give one of the two")
        require(alone or not typed, rule)


def read_prompt(prompt):
    """The text that --prompt gives or names."""
    name = prompt.removeprefix("FILE:")
    require(name or not prompt, "--prompt FILE: names no file; give its path, such as FILE:start.txt")
    try:
        if prompt == "-":
            name = "standard input"
            text = sys.stdin.buffer.read().decode("utf-8-sig")
            require(text, "standard input is empty; give at least one character, or leave --prompt out")
            return text
        if name == prompt:
            return prompt
        one = suffix_of(Path(name)) not in RECORDS
        require(one, f"{name} has documents or conversations, but --prompt FILE: takes one text; give a text file")
        text = "".join(read_text(Path(name)))
        require(text, f"{name} is empty; give at least one character, or leave --prompt out")
        return text
    except UnicodeDecodeError:
        raise UserError(f"{name} is not UTF-8 text; convert it first") from None


def show(text):
    print(text, end="", flush=True)


def print_samples(generator, prompt, config):
    """Print the first sample as it is made, then the others; a prompt that was typed stands on the screen already."""
    prompts, texts = [prompt] * config.num_samples, [""] * config.num_samples
    before = "" if config.interactive else marked(prompt)
    for number, piece in generator.stream(prompts, config.max_tokens, config.stop, config.ignore_eot):
        if number == 0:
            show(before + piece)
            before = ""
        else:
            texts[number] += piece
    print()
    for text in texts[1:]:
        print(f"---------------\n{marked(prompt)}{text}")


def print_speed(generator):
    """Tokens per second of the last batch. The prompt's include the choice of the first new token."""
    rates = []
    for name, count, seconds in (
        ("prompt", generator.prompt_tokens, generator.prompt_seconds),
        ("text", generator.new_tokens, generator.new_seconds),
    ):
        if count:
            rates.append(f"{name} {count:,} tokens in {seconds:.3f} s, {count / seconds:,.0f} tokens/s")
    print(fold("; ".join(rates)), file=sys.stderr)


def interact(generator, config):
    """Continue or answer each line that is typed, with other random numbers each time."""
    chat = Chat(generator, config.max_tokens, config.stop) if config.chat else None
    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401, it gives input() its history
    generator.warm_up()
    line = "Type a text to continue. Ctrl-C stops the answer; exit or Ctrl-D ends."
    print(HELP if chat else line, file=sys.stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in itertools.count():
        try:
            prompt = input("> ") or opening(generator.tokenizer)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if prompt in ("exit", "quit"):
            return
        try:
            generator.reseed((config.seed + number) % 2**62)
            if not chat:
                print_samples(generator, prompt, config)
            elif not chat.hear(prompt, show):
                continue
            print_speed(generator)
        except KeyboardInterrupt:
            print()
        except torch.OutOfMemoryError as error:
            print(f"error: {str(error).split('. ')[0]}; type a shorter prompt", file=sys.stderr)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


def main(argv):
    config = parse_flags(SampleConfig, argv)
    typed = config.interactive or config.chat
    reads = typed or config.prompt == "-"
    require(sys.stdin or not reads, "standard input is closed; open it, or give the text as --prompt TEXT")
    prompt = "" if typed else read_prompt(config.prompt)
    model, tokenizer, contents = load(config.run, config.device)
    print(f"{contents['path']} on {model.embed.weight.device}", file=sys.stderr)
    generator = Generator(model, tokenizer, config.num_samples, config, config.seed)  # it is a Sampling, too
    if typed:
        interact(generator, config)
    else:
        print_samples(generator, prompt or opening(tokenizer), config)
        print_speed(generator)


if __name__ == "__main__":
    with command(out_of_memory="take fewer --num_samples or a shorter --prompt", needs_output=True):
        main(sys.argv[1:])
