"""Token ids to token ids: the prompts are read at once, then each step adds one token to every sample of a batch.

On a GPU, a step is one CUDA graph, from the newest tokens to the next ones, and the host reads tokens a few steps
later, so that neither waits for the other. On a CPU the same code runs without the graph; there the cache saves time in
batches and past the context, but hardly any for one sample inside the context.
"""

import weakref
from collections import deque
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.gpu import takes_kernels
from attention.ops import may_launch
from device import WARM_UPS, CUDAGraph
from errors import require
from generation.cache import Cache
from generation.choose import Sampling, choose, refuse_nan, sample_keys
from threads import cpu_threads

DELAY = 3  # steps after which the host reads the tokens of a GPU
PREFILL = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN is slow at first calls
THREAD_WORK = 2**25  # multiplications per CPU thread; with fewer, threads mostly wait for each other


class Engine:
    """Continues batches of texts, all with the same number of texts, one batch after the other.

    Args:
        model: GPT in evaluation mode. n_vocab: int, tokens that may be chosen. batch: int, number of samples.
        sampling: Sampling. seed: int, from 0 to 2^62 - 1. graph: replay each step as a CUDA graph, with fused kernels
            if the weights have 16 bits; None does so on a GPU. The graph is recorded for the first texts, or by
            warm_up().

    Attributes:
        logits: [batch, n_vocab] float32, of the newest step.

    Raises:
        UserError: the model is in training mode.
    """

    def __init__(self, model, n_vocab, batch=1, sampling=None, seed=1337, graph=None):
        require(not model.training, "the model is in training mode, which would apply dropout; call model.eval() first")
        require(batch >= 1, f"num_samples={batch} must be at least 1")
        self.model, self.config = model, model.config
        self.n_vocab, self.batch, self.sampling = n_vocab, batch, sampling or Sampling()
        weight = model.embed.weight
        self.device, self.on_gpu = weight.device, weight.is_cuda
        self.weights = sum(parameter.numel() for parameter in model.parameters())
        self.graph, self.graphed = None, self.on_gpu if graph is None else graph
        self.fused = None
        if self.graphed and takes_kernels(self.device) and weight.dtype in (torch.float16, torch.bfloat16):
            from generation.fused import fused_logits  # imports Triton, which not every machine has

            self.fused = fused_logits
        self.cache = Cache(self.config, batch, self.device, weight.dtype)
        # the newest tokens, which are not yet in the cache, and the positions of the next ones in their texts
        self.newest, self.positions, self.keys = (torch.zeros_like(self.cache.rows) for _ in range(3))
        self.reseed(seed)
        self.delay = DELAY if self.on_gpu else 0

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
        self._start([[0] * self.config.block_size] * self.batch)
        for _ in range(WARM_UPS + 1):
            self.cache.lengths.zero_()
            self._decode_one_token()

    def tokens(self, texts, max_tokens):
        """Yield max_tokens lists of one new token id per sample, which continue texts, lists of token ids."""
        self.warm_up()
        self._start(texts)
        block_size = self.config.block_size
        while max_tokens > 0:
            full = [row for row, length in enumerate(self.cache.lengths.tolist()) if length == block_size]
            if full:
                self._prefill(full, max(block_size // 2, 1))
            count = min(max_tokens, block_size - int(self.cache.lengths.max()))  # until a row is full
            yield from self._decode_tokens(count)
            max_tokens -= count

    def _start(self, texts):
        """Begin with other texts."""
        self.texts = [list(text) for text in texts]
        self._prefill(range(self.batch), self.config.block_size)
        self.newest.copy_(torch.tensor([text[-1] for text in self.texts], device=self.device))
        self.positions.copy_(torch.tensor([len(text) for text in self.texts], device=self.device))

    @torch.inference_mode()
    def _prefill(self, rows, count):
        """Fill rows of the cache with their newest `count` tokens, except the last one, which the next step adds."""
        contexts = [self.context(self.texts[row], count)[:-1] for row in rows]
        unique = {context: number for number, context in enumerate(dict.fromkeys(contexts))}
        width = max(map(len, unique))
        index = torch.tensor(list(rows), device=self.device)
        if width > 0:
            width += self.config.key_offset  # the cache needs a token of padding
            tokens = torch.tensor([[*context, *[0] * (width - len(context))] for context in unique], device=self.device)
            sources = torch.tensor([unique[context] for context in contexts], device=self.device)
            with self._threads(tokens.numel()), sdpa_kernel(PREFILL):
                self.model.hidden(tokens, self.cache.prefill(tokens, index, sources))
        lengths = [len(context) for context in contexts]
        self.cache.lengths[index] = torch.tensor(lengths, dtype=torch.int32, device=self.device)

    def _decode_tokens(self, count):
        """Yield `count` lists of the next tokens, each a few steps after the device was told to compute it."""
        pending = deque()
        for step in range(count):
            pending.append(self._decode_one_token())
            if len(pending) > self.delay or step == 0:
                yield self._read(*pending.popleft())
        while pending:
            yield self._read(*pending.popleft())

    def _decode_one_token(self):
        """Start to compute the next tokens; returns where they will be on the host, and the event after which."""
        with torch.cuda.device_of(self.newest):  # the event is recorded on the stream of the current device
            self.logits, tokens = self.graph() if self.graph else self._step()
            tokens = tokens.to("cpu", non_blocking=self.on_gpu)  # into pinned memory; MPS has no event to wait for
            return tokens, torch.cuda.current_stream().record_event() if self.on_gpu else None

    @torch.inference_mode()
    def _step(self):
        """Add the newest tokens to the cache and choose the next ones; returns the logits and what choose() does."""
        with self._threads(self.batch):
            view = self.cache.step()
            if self.fused and may_launch(self.newest):
                logits = self.fused(self.model, self.newest, view)
            else:
                logits = self.model.logits(self.model.hidden(self.newest[:, None], view))[:, 0]
            logits = logits[:, : self.n_vocab]
            tokens = choose(logits, self.sampling, self.keys, self.positions)
        if self.config.mask_documents:  # the next token begins another document, at position 0
            self.cache.lengths.mul_(self.newest != self.config.end_of_text)
        self.positions += 1
        torch.clamp(tokens, max=logits.shape[-1] - 1, out=self.newest)  # of NaN; the host reads the tokens later
        return logits, tokens

    def _read(self, tokens, copied):
        """The tokens of _decode_one_token(), which their texts get."""
        if copied:
            copied.synchronize()
        tokens = tokens.tolist()
        for row, (text, token) in enumerate(zip(self.texts, tokens, strict=True)):
            if token >= self.n_vocab:
                refuse_nan(self.model, f"token {len(text) + 1} of sample {row + 1}")
            text.append(token)
        return tokens

    def context(self, text, count):
        """The newest `count` tokens of a text, a tuple.

        With mask_documents only those of the last document, after the last end-of-text token that is not the newest.
        """
        context = text[-count:]
        if self.config.mask_documents and self.config.end_of_text in context[:-1]:
            context = context[len(context) - 1 - context[-2::-1].index(self.config.end_of_text) :]
        return tuple(context)

    @contextmanager
    def _threads(self, tokens):
        """Limit the CPU threads to as many as pay for this number of tokens."""
        cpu_threads.share()
        before = torch.get_num_threads()
        torch.set_num_threads(min(before, max(1, self.weights * tokens // THREAD_WORK)))
        try:
            yield
        finally:
            torch.set_num_threads(before)
