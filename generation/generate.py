"""Prompts to text."""

import time

from data.chat import TURNS, encode_prompt
from data.tokenizer import end_of_text
from device import note
from errors import require
from generation.choose import Sampling
from generation.engine import Engine
from generation.text import TextStream, encode_prompt_text


def generate(model, tokenizer, prompt, *, seed=1337, max_tokens=500, stop=(), ignore_eot=False, **sampling):
    """Continue a prompt; yields pieces of text as they are made, without the prompt.

    The same seed gives the same text on the same machine. When the context is full, the model goes on with its newest
    block_size / 2 tokens only.

    Args:
        model, tokenizer: as load() of sample.py returns them; the model's device and dtype are used.
        prompt: str; "<|endoftext|>" in it is that token, if the tokenizer has it. Or a list of messages, {"role":
            "system", "user" or "assistant", "content": str}, which the assistant answers. If they are too long for the
            context, the oldest are left out; half of the context is for the answer, which ends where that is full.
        max_tokens: int, the most to add.
        stop: texts before which the sample ends. ignore_eot: go on after an end-of-text token.
        sampling: temperature, top_k, top_p and min_p, as in Sampling.

    Raises:
        UserError: an option is wrong, the tokenizer lacks a character, the prompt is empty and the tokenizer has no
            end-of-text token, or the model computes NaN.
    """
    generator = Generator(model, tokenizer, 1, Sampling(**sampling), seed)
    for _, piece in generator.stream([prompt], max_tokens, stop, ignore_eot):
        if piece:
            yield piece


def generate_batch(model, tokenizer, prompts, *, seed=1337, max_tokens=500, stop=(), ignore_eot=False, **sampling):
    """generate() for a list of prompts at once; returns the list of texts, without the prompts.

    Sample number i draws the same random numbers in any batch. Equal prompts are read once.
    """
    require(not isinstance(prompts, str), "prompts is one text; give a list of texts, or use generate()")
    require(len(prompts) > 0, "prompts is empty; give at least one")
    generator = Generator(model, tokenizer, len(prompts), Sampling(**sampling), seed)
    texts = [""] * len(prompts)
    for row, piece in generator.stream(prompts, max_tokens, stop, ignore_eot):
        texts[row] += piece
    return texts


class Generator(Engine):
    """An Engine for text: continues batches of prompts. tokenizer: the model's; other arguments as of Engine.

    Attributes:
        prompt_tokens, prompt_seconds: of the last batch, up to the first token. Equal prompts count once, and tokens
            that do not fit into the context do not count.
        new_tokens, new_seconds: of the last batch, after the first token of each sample.
    """

    def __init__(self, model, tokenizer, batch=1, sampling=None, seed=1337, graph=None):
        super().__init__(model, tokenizer.n_vocab, batch, sampling, seed, graph)
        self.tokenizer = tokenizer

    def stream(self, prompts, max_tokens=500, stop=(), ignore_eot=False):
        """Continue one prompt for each sample; yields (number of the sample, piece of text), some of them empty.

        Arguments and errors as in generate().
        """
        require(max_tokens >= 1, f"max_tokens={max_tokens} must be at least 1")
        require(len(prompts) == self.batch, f"{len(prompts)} prompts for {self.batch} samples; give one for each")
        block_size = self.config.block_size
        room = block_size + 1 - min(max_tokens, block_size // 2)
        encoded = {}  # equal prompts are encoded once
        for prompt in prompts:
            if str(prompt) not in encoded:
                encoded[str(prompt)] = self._encode(prompt, room)
        texts = [encoded[str(prompt)] for prompt in prompts]
        longest = max(len(self.context(text, block_size + 1)) for text in texts)
        if longest > block_size:
            note(f"the prompt is longer than block_size; the model reads its last {block_size} tokens")
        ends = set() if ignore_eot else {end_of_text(self.tokenizer)}
        if not all(isinstance(prompt, str) for prompt in prompts):
            ends |= {self.tokenizer._special_tokens[name] for name in TURNS}
            max_tokens = min(max_tokens, block_size + 1 - max(map(len, texts)))
        stop = [text for text in ((stop,) if isinstance(stop, str) else stop) if text]
        streams = [TextStream(self.tokenizer, stop, ends) for _ in prompts]

        self.warm_up()
        started = time.perf_counter()
        self.prompt_tokens = sum(map(len, {self.context(text, block_size) for text in texts}))
        self.new_tokens = self.new_seconds = 0
        for step, tokens in enumerate(self.tokens(texts, max_tokens)):
            seconds = time.perf_counter() - started
            if step == 0:
                self.prompt_seconds = seconds
            else:
                self.new_tokens += sum(not stream.ended for stream in streams)
                self.new_seconds = seconds - self.prompt_seconds
            for row, (stream, token) in enumerate(zip(streams, tokens, strict=True)):
                if not stream.ended:
                    yield row, stream.add(token)
            if all(stream.ended for stream in streams):
                return
        for row, stream in enumerate(streams):
            if not stream.ended:
                yield row, stream.finish()

    def _encode(self, prompt, room):
        if isinstance(prompt, str):
            return encode_prompt_text(self.tokenizer, prompt)
        return encode_prompt(self.tokenizer, prompt, room)
