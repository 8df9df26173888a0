"""Prompts to text: the prompt is read at once, then each step adds one token to every sample of a batch.

On a GPU, a step is one CUDA graph, from the newest tokens to the next ones, and the host reads tokens a few steps
later, so that neither waits for the other. On a CPU the same code runs without the graph; there the cache saves time in
batches and past the context, but hardly any for one sample inside the context.
"""

import sys
import time
import weakref
from collections import deque
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.gpu import HAS_TRITON
from attention.ops import may_launch
from data.chat import TURNS, encode_prompt
from data.tokenizer import end_of_text
from device import WARM_UPS, CUDAGraph
from errors import require
from generation.cache import Cache
from generation.choose import Sampling, choose, refuse_nan, sample_keys
from generation.text import TextStream, encode

DELAY = 3  # steps after which the host reads the tokens of a GPU
PREFILL = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN is slow at first calls
THREAD_WORK = 2**25  # multiplications per CPU thread; with fewer, threads mostly wait for each other


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


class Generator:
    """Continues batches of prompts, one after the other, all with the same number of prompts.

    Args:
        model: GPT in evaluation mode. tokenizer: its tokenizer. batch: int, number of samples. sampling: Sampling.
        seed: int, from 0 to 2^62 - 1. graph: replay each step as a CUDA graph, with fused kernels if the weights have
            16 bits; None does so on a GPU. The graph is recorded for the first prompts, or by warm_up().

    Attributes:
        logits: [batch, n_vocab] float32, of the newest step.
        prompt_tokens, prompt_seconds: of the last batch, up to the first token. Equal prompts count once, and tokens
            that do not fit into the context do not count.
        new_tokens, new_seconds: of the last batch, after the first token of each sample.

    Raises:
        UserError: the model is in training mode.
    """

    def __init__(self, model, tokenizer, batch=1, sampling=None, seed=1337, graph=None):
        require(not model.training, "the model is in training mode, which would apply dropout; call model.eval() first")
        require(batch >= 1, f"num_samples={batch} must be at least 1")
        self.model, self.tokenizer, self.batch = model, tokenizer, batch
        self.sampling, self.config, self.noted = sampling or Sampling(), model.config, set()
        weight = model.embed.weight
        self.device, dtype = weight.device, weight.dtype
        self.weights = sum(parameter.numel() for parameter in model.parameters())
        on_gpu = self.device.type == "cuda"
        self.graph, self.graphed = None, on_gpu if graph is None else graph
        self.fused = None
        if self.graphed and HAS_TRITON and dtype in (torch.float16, torch.bfloat16):
            from generation.fused import can_fuse, fused_logits  # imports Triton, which not every machine has

            self.fused = fused_logits if can_fuse(self.config) else None
        self.cache = Cache(model.config, batch, self.device, dtype)
        # the newest tokens, which are not yet in the cache, and the positions of the next ones in their texts
        self.newest, self.positions, self.keys = (torch.zeros_like(self.cache.rows) for _ in range(3))
        self.reseed(seed)
        self.filled = [0] * batch  # tokens of each row that are in the cache
        self.delay = DELAY if on_gpu else 0
        options = dict(dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self.host_tokens = [torch.zeros(batch, **options) for _ in range(self.delay + 1)]
        self.copied = [torch.cuda.Event() for _ in self.host_tokens] if on_gpu else None

    def reseed(self, seed):
        """Draw other random numbers from now on."""
        require(0 <= seed < 2**62, f"seed={seed} must be from 0 to 2^62 - 1")
        self.keys.copy_(sample_keys(seed, self.cache.rows))

    def warm_up(self):
        """Record the graph and let the libraries choose their kernels, unless this has been done."""
        if not self.graphed or self.graph:
            return
        step = weakref.WeakMethod(self._step)  # a cycle would keep the cache after its use
        with torch.cuda.device_of(self.newest):  # the graph's stream is one of the current device
            self.graph = CUDAGraph(lambda: step()())
        self.texts = [[0] * self.config.block_size] * self.batch
        self._fill(range(self.batch), self.config.block_size)
        for _ in range(WARM_UPS + 1):
            self.cache.lengths.zero_()
            self._take_step(0)

    def stream(self, prompts, max_tokens=500, stop=(), ignore_eot=False):
        """Continue one prompt for each sample; yields (number of the sample, piece of text), some of them empty.

        Arguments and errors as in generate().
        """
        require(max_tokens >= 1, f"max_tokens={max_tokens} must be at least 1")
        require(len(prompts) == self.batch, f"{len(prompts)} prompts for {self.batch} samples; give one for each")
        texts, end = self._encode(prompts, max_tokens), None if ignore_eot else end_of_text(self.tokenizer)
        self.warm_up()  # after the check of the prompts
        stop = [text for text in ((stop,) if isinstance(stop, str) else stop) if text]
        ends = {end}
        if not all(isinstance(prompt, str) for prompt in prompts):
            ends |= {self.tokenizer._special_tokens[name] for name in TURNS}
            max_tokens = min(max_tokens, self.config.block_size + 1 - max(map(len, texts)))
        return self._pieces(texts, max_tokens, [TextStream(self.tokenizer, stop, ends) for _ in prompts])

    def _pieces(self, texts, max_tokens, streams):
        start, first, self.new_tokens = time.perf_counter(), None, 0
        self.prompt_tokens = sum(map(len, {self._context(text, self.config.block_size) for text in texts}))
        try:
            for tokens in self.tokens(texts, max_tokens):
                if first is None:
                    first = time.perf_counter()
                else:
                    self.new_tokens += sum(not stream.ended for stream in streams)
                for row, (stream, token) in enumerate(zip(streams, tokens, strict=True)):
                    if not stream.ended:
                        yield row, stream.add(token)
                if all(stream.ended for stream in streams):
                    break
        finally:
            now = time.perf_counter()
            first = first or now
            self.prompt_seconds, self.new_seconds = first - start, now - first
        for row, stream in enumerate(streams):
            if not stream.ended:
                yield row, stream.finish()

    def tokens(self, texts, max_tokens):
        """Yield max_tokens lists of one new token id per sample, which continue texts, lists of token ids."""
        self.warm_up()
        block_size = self.config.block_size
        self.texts = [list(text) for text in texts]
        rows = range(self.batch)
        self._fill(rows, block_size)
        self.newest.copy_(torch.tensor([text[-1] for text in texts], device=self.device))
        self.positions.copy_(torch.tensor(list(map(len, texts)), device=self.device))
        pending = deque()
        for step in range(max_tokens):
            if block_size in self.filled:
                while pending:  # the tokens to fill the cache from
                    yield self._read(pending.popleft())
                # the host did not know that the device emptied the rows of new documents
                lengths = [len(self._context(text)) - 1 for text in self.texts]
                self.filled = list(map(min, self.filled, lengths))
                full_rows = [row for row in rows if self.filled[row] == block_size]
                if full_rows:
                    self._fill(full_rows, max(block_size // 2, 1))
            slot = step % len(self.host_tokens)
            self._take_step(slot)
            self.filled = [count + 1 for count in self.filled]
            pending.append(slot)
            if len(pending) > self.delay or step == 0:
                yield self._read(pending.popleft())
        while pending:
            yield self._read(pending.popleft())

    def _context(self, text, count=None):
        """The tokens that the next one depends on, a tuple; at most the newest `count` if it is given.

        With mask_documents these are the last document, with its end-of-text token.
        """
        start = 0
        if self.config.mask_documents:
            ends = (index for index in range(len(text) - 2, -1, -1) if text[index] == self.config.end_of_text)
            start = next(ends, -1) + 1
        return tuple(text[start if count is None else max(start, len(text) - count) :])

    @torch.inference_mode()
    def _fill(self, rows, count):
        """Fill rows of the cache with their newest `count` tokens, except the last one, which the next step adds."""
        contexts = [self._context(self.texts[row], count)[:-1] for row in rows]
        unique = {context: index for index, context in enumerate(dict.fromkeys(contexts))}
        width = max(map(len, unique))
        index = torch.tensor(list(rows), device=self.device)
        if width > 0:
            width += self.config.key_offset  # the cache needs a token of padding
            padded = [context + (0,) * (width - len(context)) for context in unique]
            sources = torch.tensor([unique[context] for context in contexts], device=self.device)
            tokens = torch.tensor(padded, device=self.device)
            with self._threads(tokens.numel()), sdpa_kernel(PREFILL):
                self.model.hidden(tokens, self.cache.prefill(tokens, index, sources))
        lengths = list(map(len, contexts))
        self.cache.lengths[index] = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        for row, length in zip(rows, lengths, strict=True):
            self.filled[row] = length

    @torch.inference_mode()
    def _step(self):
        """Add the newest tokens to the cache and choose the next ones; returns the logits and what choose() does."""
        with self._threads(self.batch):
            view = self.cache.step()
            if self.fused and may_launch(self.newest):
                logits = self.fused(self.model, self.newest, view)
            else:
                logits = self.model.logits(self.model.hidden(self.newest[:, None], view))[:, 0]
            return self._choose_tokens(logits[:, : self.tokenizer.n_vocab])

    @contextmanager
    def _threads(self, tokens):
        """Limit the CPU threads to as many as pay for this number of tokens."""
        before = torch.get_num_threads()
        if self.device.type == "cpu":
            torch.set_num_threads(min(before, max(1, self.weights * tokens // THREAD_WORK)))
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _choose_tokens(self, logits):
        tokens = choose(logits, self.sampling, self.keys, self.positions)
        if self.config.mask_documents:  # the next token begins another document, at position 0
            self.cache.lengths.mul_(self.newest != self.config.end_of_text)
        self.positions += 1
        torch.clamp(tokens, max=logits.shape[-1] - 1, out=self.newest)  # of NaN; the host reads the tokens later
        return logits, tokens

    def _take_step(self, slot):
        """Choose the next tokens and start to copy them to the host, into host_tokens[slot]."""
        with torch.cuda.device_of(self.newest):  # events are recorded on the stream of the current device
            self.logits, tokens = self.graph() if self.graph else self._step()
            self.host_tokens[slot].copy_(tokens, non_blocking=self.copied is not None)
            if self.copied:
                self.copied[slot].record()

    def _read(self, slot):
        if self.copied:
            self.copied[slot].synchronize()
        tokens = self.host_tokens[slot].tolist()
        for row, (text, token) in enumerate(zip(self.texts, tokens, strict=True)):
            if token >= self.tokenizer.n_vocab:
                refuse_nan(self.model, f"token {len(text) + 1} of sample {row + 1}")
            text.append(token)
        return tokens

    def _encode(self, prompts, max_tokens):
        """Token ids of the prompts. Prints a note if prompt or text do not fit into the context."""
        block_size, end = self.config.block_size, end_of_text(self.tokenizer)
        known, room = {}, block_size + 1 - min(max_tokens, block_size // 2)
        for prompt in prompts:
            if not isinstance(prompt, str):
                known[repr(prompt)] = encode_prompt(self.tokenizer, prompt, room)
            elif repr(prompt) not in known:
                ids = encode(self.tokenizer, prompt) or ([] if end is None else [end])
                require(ids, "the prompt is empty; give at least one character")
                known[repr(prompt)] = ids
        longest = max(len(self._context(ids)) for ids in known.values())
        if longest > block_size:
            self._note(f"the prompt is longer than block_size; the model reads its last {block_size} tokens")
        if longest + max_tokens > block_size + 1 and all(isinstance(prompt, str) for prompt in prompts):
            newest = max(block_size // 2, 1)
            self._note(f"past {block_size} tokens (block_size), the model reads only the newest {newest}")
        return [known[repr(prompt)] for prompt in prompts]

    def _note(self, text):
        """Print a line to standard error, once."""
        if text not in self.noted:
            self.noted.add(text)
            print(f"note: {text}", file=sys.stderr)
