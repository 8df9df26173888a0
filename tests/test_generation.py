"""Generation: logits and greedy text against the network without a cache, batches, ends of samples, mistakes."""

import contextlib
import copy
import gc
import itertools
import weakref
from functools import partial

import pytest
import torch
from problems import ON_GPU

from attention import decode
from data import make_tokenizer
from data.tokenizer import LINE_PATTERN, _encoding
from generation import Generator, Sampling, generate, generate_batch
from generation.cache import Cache
from generation.generate import to_bfloat16
from model import GPT, HAS_TRITON, GPTConfig

SMALL = dict(vocab_size=256, block_size=16, n_layer=2, n_head=2, n_embd=32)
MODELS = {
    "classic": {},
    "modern": dict(
        position="rope", norm="rmsnorm", mlp="relu2", n_head=4, n_kv_head=1, qk_norm=True, logit_softcap=15.0
    ),
    "grouped": dict(n_head=4, n_kv_head=2, bias=True, mlp="swiglu", tie_head=False),
    "odd_context": dict(block_size=7, position="rope"),
    "paths": dict(
        position="rope", norm="rmsnorm", norm_weight=False, embed_skip=True, value_residual=True, window=5,
    ),
    "window": dict(norm_weight=False, n_layer=4, window=5),
}  # fmt: skip
GREEDY = Sampling(temperature=0)
BYTES = make_tokenizer("bytes", "")
ENDED = _encoding("ended", LINE_PATTERN, [bytes([value]) for value in range(256)], {"<|endoftext|>": 256})
GRAPH = [False, pytest.param(True, marks=pytest.mark.skipif(not ON_GPU, reason="needs a GPU"))]


def make_model(device, **changes):
    """An untrained network whose logits differ enough for its greedy text to be certain."""
    model = GPT(GPTConfig(**SMALL | changes)).to(device).eval()
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.dim() == 2 else 1
    for name, parameter in model.named_parameters():
        if name.endswith(("skip", "share")):
            parameter.data += 0.2
    return model


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def model(request, device):
    return make_model(device, **request.param)


def contexts(prompt, block_size):
    """The context in which each next token is chosen, by the rule: a generator that is sent the new tokens."""
    text, start = list(prompt), max(0, len(prompt) - block_size)
    while True:
        if len(text) - start > block_size:
            start = len(text) - max(block_size // 2, 1)
        text.append((yield text[start:]))


def uncached(model, prompt, count, choice=torch.argmax):
    """Greedy text, and the logits [count, V] of its tokens, without a cache."""
    windows, logits, tokens = contexts(prompt, model.config.block_size), [], []
    window = next(windows)
    for _ in range(count):
        with torch.no_grad():
            logits.append(model(torch.tensor([window], device=model.embed.weight.device))[0, -1])
        tokens.append(int(choice(logits[-1])))
        window = windows.send(tokens[-1])
    return tokens, torch.stack(logits)


PROMPTS = [[5, 80, 9], [7], list(range(40, 56)), list(range(100, 130)), [7], [1] * 15]


def run(generator, prompts, count):
    """Tokens [samples][count] and logits [samples, count, V]."""
    tokens, logits = [], []
    for new in generator.tokens(prompts, count):
        tokens.append(new)
        logits.append(generator.logits.clone())
    return list(map(list, zip(*tokens, strict=True))), torch.stack(logits, 1)


@pytest.mark.parametrize("graph", GRAPH)
def test_logits_and_greedy_text_equal_uncached_ones(model, graph):
    """Prompts of unequal lengths, some of them equal, one longer than the context, and across several refills."""
    generator = Generator(model, BYTES, len(PROMPTS), GREEDY, graph=graph)
    generator.delay = 0  # so that the logits are those of the token
    tokens, logits = run(generator, PROMPTS, 45)
    for prompt, row, found in zip(PROMPTS, tokens, logits, strict=True):
        expected, exact = uncached(model, prompt, 45)
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
        assert row == expected


@pytest.mark.skipif(not HAS_TRITON or ON_GPU, reason="in Triton's interpreter; on a GPU test_bfloat16 does it")
@pytest.mark.parametrize("name", [*(name for name in MODELS if name != "paths"), "biased"])
def test_fused_logits_are_those_of_the_network(name, device, monkeypatch):
    """Also the keys and values in the cache."""
    from generation.fused import fused_logits

    monkeypatch.setattr("generation.cache.decode", partial(decode, impl="triton"))
    options = MODELS.get(name, dict(bias=True, mlp="gelu_tanh", n_embd=48))
    model = make_model(device, **options)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases
            parameter.data += torch.randn_like(parameter) / 3
    generator = Generator(model, BYTES, 3, GREEDY, graph=False)
    generator.delay = 0
    cache = generator.cache
    for _ in generator.tokens(PROMPTS[:3], 2):
        newest = torch.tensor([text[-2] for text in generator.texts], device=device)
        stored = [x[:, cache.rows, cache.slots].clone() for x in (cache.k, cache.v)]
        for x in (cache.k, cache.v):
            x[:, cache.rows, cache.slots] = float("nan")
        with torch.inference_mode():
            logits = fused_logits(model, newest, cache.next)
        torch.testing.assert_close(logits[:, : BYTES.n_vocab], generator.logits, rtol=1e-4, atol=1e-4)
        for x, expected in zip((cache.k, cache.v), stored, strict=True):
            torch.testing.assert_close(x[:, cache.rows, cache.slots], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("graph", GRAPH)
def test_bfloat16(model, graph):
    """Against float32, the logits err at most twice as much as those of the bfloat16 network without a cache."""
    exact_model = copy.deepcopy(model)
    generator = Generator(to_bfloat16(model), BYTES, len(PROMPTS), GREEDY, graph=graph)
    generator.delay = 0
    tokens, logits = run(generator, PROMPTS, 45)
    errors = torch.zeros(2)
    for prompt, row, found in zip(PROMPTS, tokens, logits, strict=True):
        given = [iter(row) for _ in range(2)]  # both networks are given our tokens
        exact, eager = (
            uncached(net, prompt, 45, lambda logits, it=it: next(it))[1]
            for net, it in zip((exact_model, model), given, strict=True)
        )
        errors += torch.stack([(x - exact).square().sum() for x in (found, eager)]).cpu()
    ours, of_eager = errors.sqrt().tolist()
    assert ours <= 2 * of_eager, f"error {ours:.2e}, eager {of_eager:.2e}"


def test_bfloat16_keeps_norms_and_angles(device):
    model = to_bfloat16(make_model(device, **MODELS["modern"]))
    kept = [model.norm.weight, model.rotary_cos]
    assert all(x.dtype == torch.float32 for x in kept) and model.head.weight.dtype == torch.bfloat16
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("delay", [1, 3])
def test_a_delay_changes_nothing(device, delay):
    """The host reads tokens some steps later, but all of them before it fills the cache anew."""
    model, found = make_model(device), []
    for steps in (0, delay):
        generator = Generator(model, BYTES, 2, Sampling(), graph=False)
        generator.delay = steps
        generator.host_tokens = [torch.zeros(2, dtype=torch.int64) for _ in range(steps + 1)]
        generator.copied = None if device == "cpu" else [torch.cuda.Event() for _ in generator.host_tokens]
        found.append(list(generator.tokens([[1, 2, 3], [4]], 50)))
    assert found[0] == found[1] and len(found[0]) == 50


@pytest.mark.parametrize("graph", GRAPH)
@pytest.mark.parametrize("position", ["learned", "rope"])
def test_documents(device, position, graph):
    """With mask_documents, a token depends on nothing before an end of text, in a prompt, a text, or across refills."""
    config = dict(vocab_size=257, block_size=24, position=position, mask_documents=True, end_of_text=256)
    model = make_model(device, **config)
    prompts = [[1, 2, 256, 3, 4], [256], [5, 256], [*range(30), 256, *range(9)], list(range(40)), [256, 6], [7] * 24]
    generator = Generator(model, ENDED, len(prompts), GREEDY, graph=graph)
    generator.delay = 0
    given = [torch.randint(256, (len(prompts),)).to(device) for _ in range(100)]
    for step, row in ((2, 0), (3, 0), (20, 2), (40, 3), (70, 1), (72, 5)):
        given[step][row] = 256
    logits = []
    for step, _ in enumerate(generator.tokens(prompts, 100)):
        logits.append(generator.logits.clone())
        generator.newest.copy_(given[step])
        for row, text in enumerate(generator.texts):
            text[-1] = int(given[step][row])
    for row, (prompt, found) in enumerate(zip(prompts, torch.stack(logits, 1), strict=True)):
        text, start = list(prompt), max(0, len(prompt) - 24)
        for step, tokens in enumerate(given):
            if 256 in text[start:-1]:
                start = len(text) - 1 - text[-2::-1].index(256)
            if len(text) - start > 24:
                start = len(text) - 12
            context = torch.tensor([text[start:]], device=device)
            with torch.no_grad():
                torch.testing.assert_close(found[step], model(context)[0, -1], rtol=1e-4, atol=1e-4)
                if len(text) <= 24:  # the network itself tells the documents apart, up to four in 24 tokens
                    whole = model(torch.tensor([text + [0] * (24 - len(text))], device=device))[0, len(text) - 1]
                    torch.testing.assert_close(found[step], whole, rtol=1e-4, atol=1e-4)
            text.append(int(tokens[row]))


def test_a_generator_serves_one_batch_after_another(model):
    generator = Generator(model, BYTES, 2, Sampling(repetition_penalty=1.3))
    first = list(generator.tokens([[1, 2, 3], [4]], 30))
    assert list(generator.tokens([[9] * 20, [4]], 30)) != first
    assert list(generator.tokens([[1, 2, 3], [4]], 30)) == first
    half = generator.tokens([[9], [4]], 30)
    next(half)
    half.close()
    assert list(generator.tokens([[1, 2, 3], [4]], 30)) == first


def test_a_sample_does_not_depend_on_its_batch(device):
    """In float64, in which rounding cannot change a choice."""
    model = make_model(device).double()
    alone = "".join(generate(model, BYTES, "abc", max_tokens=40))
    many = generate_batch(model, BYTES, ["abc", "abc", "something else"], max_tokens=40)
    assert many[0] == alone != many[1]
    assert many == generate_batch(model, BYTES, ["abc", "abc", "something else"], max_tokens=40)
    assert generate_batch(model, BYTES, ["x", "abc"], max_tokens=40)[1] == many[1]
    assert "".join(generate(model, BYTES, "abc", max_tokens=40, seed=1)) != alone


def test_a_penalty_counts_prompt_and_text(device):
    model = make_model(device, vocab_size=300)
    text = generate_batch(model, BYTES, ["ab"], max_tokens=60, temperature=0, repetition_penalty=1e9)[0]
    generator = Generator(model, BYTES, 1, Sampling(temperature=0, repetition_penalty=1e9))
    tokens = [97, 98, *itertools.chain(*generator.tokens([[97, 98]], 60))]
    assert len(set(tokens)) == 62 and text  # no token comes twice, and none is from the padded vocabulary
    assert max(tokens) < 256


def script(monkeypatch, *texts):
    """Let sample i of the next batch have the tokens of its text, then letters x."""
    steps = zip(*([*text, *[ord("x")] * 60] for text in texts), strict=False)
    choose = lambda *args: torch.tensor(next(steps))  # noqa: E731
    monkeypatch.setitem(Generator.stream.__globals__, "choose", choose)


def test_samples_end_at_the_end_of_text(monkeypatch):
    model = make_model("cpu", vocab_size=257)
    texts = [[*b"one", 256, *b"more"], [*b"two, and then", 256]]
    script(monkeypatch, *texts)
    assert generate_batch(model, ENDED, ["", "p"], max_tokens=30) == ["one", "two, and then"]
    script(monkeypatch, *texts)
    ignored = generate_batch(model, ENDED, ["", "p"], max_tokens=8, ignore_eot=True)
    assert ignored == ["one<|endoftext|>more", "two, and"]
    script(monkeypatch, *texts)
    generator = Generator(model, ENDED, 2)
    generator.reseed(2**62 - 1)
    assert len(list(generator.stream(["", "p"], 30))) == 4 + 14  # both end, so nothing more is computed
    assert generator.prompt_tokens == 2 and generator.new_tokens == 3 + 13


def test_stops_of_a_batch_and_unfinished_characters(monkeypatch):
    model = make_model("cpu")
    script(monkeypatch, b"one STOP two", "né".encode() + b"\xc3")
    assert generate_batch(model, BYTES, ["a", "b"], max_tokens=12, stop="STOP") == ["one ", "né\ufffdxxxxxxxx"]


def test_notes_are_said_once(device, capsys):
    model = make_model(device)
    generate_batch(model, BYTES, ["ab", "abc"], max_tokens=14)
    assert capsys.readouterr().err == ""  # 3 + 13 tokens in the cache: the last one is not fed
    generator = Generator(model, BYTES, 2)
    for _ in range(2):
        list(generator.stream(["ab", "abc"], 60))
    err = capsys.readouterr().err
    assert err.count("note: ") == 1 and "past 16 tokens" in err and "newest 8" in err
    generator = Generator(model, BYTES, 2)
    list(generator.stream(["a" * 17, "abc"], 60))
    err = capsys.readouterr().err
    assert err.count("note: ") == 2 and "longer than the context" in err and "last 16 tokens" in err
    assert "newest 8" in err and generator.prompt_tokens == 16 + 3


def test_mistakes(device):
    model, char = make_model(device), make_tokenizer("char", "abc")
    for call, words in [
        (lambda: generate_batch(model, char, ["ab", "ax"]), "no token for 'x'"),
        (lambda: generate_batch(model, char, ["ab", ""]), "the prompt is empty"),
        (lambda: generate_batch(model, char, []), "prompts is empty"),
        (lambda: generate_batch(model, char, "abc"), "prompts is one text"),
        (lambda: generate_batch(model, char, ["ab"], seed=2**62), "seed=4611686018427387904"),
        (lambda: list(generate(model, char, "ab", seed=-1)), "seed=-1"),
        (lambda: list(generate(model, char, "ab", top_p=0.0)), "top_p=0.0"),
        (lambda: list(generate(model, char, "ab", min_p=1.5)), "min_p=1.5"),
        (lambda: list(generate(model, char, "ab", repetition_penalty=0.0)), "repetition_penalty=0.0"),
        (lambda: list(generate(model, char, "ab", temperature=float("nan"))), "temperature=nan"),
        (lambda: list(generate(model, char, "ab", max_tokens=0)), "max_tokens=0"),
        (lambda: list(Generator(model, char, 2).stream(["ab"])), "1 prompts for 2 samples"),
        (lambda: Generator(model, char, 10**9), "num_samples=1000000000 needs"),
        (lambda: Generator(make_model(device).train(), char), "model.eval()"),
    ]:
        with pytest.raises(ValueError) as error:
            call()
        assert words in str(error.value) and "\n" not in str(error.value)


def test_memory_is_free_when_a_generator_goes_out_of_use(device):
    """At once, not when the garbage collector runs."""
    generator = Generator(make_model(device), BYTES)
    list(generator.stream(["abc"], 30))
    cache = weakref.ref(generator.cache)
    gc.collect()
    gc.disable()
    try:
        del generator
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_step_does_not_wait_for_the_device(device):
    generator = Generator(make_model(device), BYTES, 4)
    try:
        for _ in generator.tokens([[1, 2, 3]] * 4, 8):  # without a refill
            torch.cuda.set_sync_debug_mode("error")  # it allows to wait for an event
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current_one():
    model = make_model("cuda:1")
    generator = Generator(model, BYTES, len(PROMPTS), GREEDY)
    found = list(zip(*generator.tokens(PROMPTS, 45), strict=True))
    assert found == [tuple(uncached(model, prompt, 45)[0]) for prompt in PROMPTS] and torch.cuda.current_device() == 0


def test_threads(monkeypatch):
    """A small step takes one thread of a CPU, a long prompt more; the caller's number is restored."""
    model, used, before = make_model("cpu"), [], torch.get_num_threads()
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda *args: used.append(torch.get_num_threads()) or hidden(*args))
    monkeypatch.setitem(Generator.stream.__globals__, "THREAD_WORK", 10 * sum(p.numel() for p in model.parameters()))
    torch.set_num_threads(3)
    try:
        for _ in Generator(model, BYTES).tokens(
            [[1] * 16], 2
        ):  # 15 tokens of the prompt, a step, a refill of 7, a step
            assert torch.get_num_threads() == 3
        assert used == [1, 1, 1, 1]
        used.clear()
        list(Generator(model, BYTES, 32).tokens([[index, *[1] * 15] for index in range(32)], 1))
        assert used == [3, 3]  # 480 tokens, then 32 at a time
    finally:
        torch.set_num_threads(before)


def test_cache_size(device):
    config = GPTConfig(**SMALL | MODELS["modern"])
    cache = Cache(config, 3, device, torch.bfloat16)
    assert 3 * Cache.size(config, torch.bfloat16) == sum(x.numel() * x.element_size() for x in (cache.k, cache.v))


def test_a_text_can_be_left_early(device):
    with contextlib.closing(generate(make_model(device), BYTES, "abc")) as pieces:
        assert next(pieces)
