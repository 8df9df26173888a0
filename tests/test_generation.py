"""Generation: logits and greedy text against the network without a cache, the choice of a token, ends of samples."""

import copy
import math
from dataclasses import fields
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from problems import ON_GPU, needs_gpu

from attention.gpu import HAS_TRITON
from data.tokenizer import LINE_PATTERN, _encoding, make_tokenizer
from errors import UserError
from generation import Generator, Sampling, generate, generate_batch
from generation import choose as choose_module
from generation.cache import Cache
from generation.choose import choose, exponential, mix, sample_keys
from generation.engine import Engine
from generation.score import score
from model import GPT, GPTConfig
from weights import to_bfloat16

SMALL = dict(vocab_size=256, block_size=16, n_layer=2, n_head=2, n_embd=32)
MODELS = {
    "classic": {},
    "modern": dict(
        position="rope", norm="rmsnorm", mlp="relu2", n_head=4, n_kv_head=1, qk_norm=True, logit_softcap=15.0
    ),
    "grouped": dict(n_head=4, n_kv_head=2, bias=True, mlp="swiglu", tie_head=False),
    "odd_context": dict(block_size=7, position="rope"),
    "paths": dict(
        position="rope", norm="rmsnorm", norm_weight=False, embed_norm=True, embed_skip=True, value_residual=True,
        key_offset=True, window=5, tie_head=False,
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
        if name.endswith(("skips", "value_mix")):
            parameter.data += 0.2
    return model


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def model(request, device):
    return make_model(device, **request.param)


def uncached(model, prompt, count, choice=torch.argmax):
    """Greedy text, and the logits [count, V] of its tokens, without a cache."""
    config, text, start, logits = model.config, list(prompt), max(0, len(prompt) - model.config.block_size), []
    for _ in range(count):
        if config.mask_documents and config.end_of_text in text[start:-1]:
            start = len(text) - 1 - text[-2::-1].index(config.end_of_text)
        if len(text) - start > config.block_size:
            start = len(text) - max(config.block_size // 2, 1)
        with torch.no_grad():
            logits.append(model(torch.tensor([text[start:]], device=model.embed.weight.device))[0, -1])
        text.append(int(choice(logits[-1])))
    return text[len(prompt) :], torch.stack(logits)


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
    if graph:  # with the usual delay, after which the host reads the tokens
        delayed = Generator(model, BYTES, len(PROMPTS), GREEDY).tokens(PROMPTS, 45)
        assert list(map(list, zip(*delayed, strict=True))) == tokens


def others(option, value):
    """Other values of an option of GPTConfig, by its type, so that one that is added has some too."""
    if get_origin(option.type) is Literal:
        return [other for other in get_args(option.type) if other != value]
    return [not value] if option.type is bool else [1 if value is None else 2 * value or 0.5]


@pytest.mark.skipif(not HAS_TRITON or ON_GPU, reason="in Triton's interpreter; on a GPU test_bfloat16 does it")
@pytest.mark.parametrize("option", fields(GPTConfig), ids=lambda option: option.name)
def test_fused_logits_are_those_of_the_network(option, device, monkeypatch):
    """With other values of each option, in a classic network and a modern one; one row is at position 0 again."""
    from generation.fused import fused_logits
    from generation.linear import Tiles

    monkeypatch.setattr("generation.linear.choose_tiles", lambda *sizes: Tiles(8, 128, 64, 1, 1))  # few programs
    tried, tiny = 0, dict(vocab_size=32, block_size=4, n_layer=2, n_head=2, n_embd=32)
    for base in (tiny | dict(bias=True), MODELS["modern"] | MODELS["paths"] | tiny):
        for value in others(option, getattr(GPTConfig(**base), option.name)):
            try:
                model = make_model(device, **base | {option.name: value})
            except UserError:  # an option that this network cannot have
                continue
            tried += 1
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.data += torch.randn_like(parameter) / 3
            caches = [Cache(model.config, 2, device, torch.float32) for _ in range(2)]
            for _ in range(2):
                tokens = torch.randint(32, (2,))
                with torch.inference_mode():
                    found = fused_logits(model, tokens, caches[0].step())
                    expected = model.logits(model.hidden(tokens[:, None], caches[1].step()))[:, 0]
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=f"{value}, {base}")
                for cache in caches:
                    cache.lengths[1] = 0
    assert tried


def given_text(model, prompt, tokens):
    """The logits [len(tokens), V] of a text that is given, without a cache."""
    given = iter(tokens)
    return uncached(model, prompt, len(tokens), lambda logits: next(given))[1]


@pytest.mark.parametrize("graph", GRAPH)
def test_bfloat16(model, graph):
    """Against float32, the logits err at most twice as much as those of the bfloat16 network without a cache."""
    exact_model, prompts, count = copy.deepcopy(model), PROMPTS[:4], 24
    generator = Generator(to_bfloat16(model), BYTES, len(prompts), GREEDY, graph=graph)
    generator.delay = 0
    tokens, logits = run(generator, prompts, count)
    errors = torch.zeros(2)
    for prompt, row, found in zip(prompts, tokens, logits, strict=True):
        exact, eager = (given_text(network, prompt, row) for network in (exact_model, model))
        errors += torch.stack([(x - exact).square().sum() for x in (found, eager)]).cpu()
    ours, of_eager = errors.sqrt().tolist()
    assert ours <= 2 * of_eager, f"error {ours:.2e}, eager {of_eager:.2e}"


@pytest.mark.parametrize("graph", GRAPH)
@pytest.mark.parametrize("options", [{}, dict(position="rope", key_offset=True)], ids=str)
def test_documents(device, options, graph):
    """With mask_documents, a token depends on nothing before an end of text, in a prompt, a text, or across refills."""
    model = make_model(device, vocab_size=257, block_size=24, mask_documents=True, end_of_text=256, **options)
    prompts = [[1, 2, 256, 3, 4], [256], [*range(30), 256, *range(9)], list(range(40)), [256, 6]]
    generator = Generator(model, ENDED, len(prompts), GREEDY, graph=graph)
    generator.delay = 0
    given = [torch.randint(256, (len(prompts),)).to(device) for _ in range(60)]
    for step, row in ((2, 0), (3, 0), (20, 2), (30, 3), (50, 1), (52, 4)):
        given[step][row] = 256
    logits = []
    for step, _ in enumerate(generator.tokens(prompts, 60)):
        logits.append(generator.logits.clone())
        generator.newest.copy_(given[step])
        for row, text in enumerate(generator.texts):
            text[-1] = int(given[step][row])
    for row, (prompt, found) in enumerate(zip(prompts, torch.stack(logits, 1), strict=True)):
        expected = given_text(model, prompt, [tokens[row] for tokens in given])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("default", ["meta", pytest.param("cuda", marks=needs_gpu)])
def test_any_default_device(default, device):
    """Of torch.set_default_device(): the network, and text and log-likelihoods from it."""
    with torch.device(device):
        network = GPT(GPTConfig(**SMALL | MODELS["paths"])).eval()
    assert {x.device.type for x in network.state_dict(keep_vars=True).values()} == {device}
    calls = (
        lambda: "".join(generate(network, BYTES, "a", max_tokens=20, temperature=0)),
        lambda: score(network, [(np.arange(9), 1), (np.arange(20), 4)], 2),
    )
    expected = [call() for call in calls]
    with torch.device(default):
        assert [call() for call in calls] == expected


def test_a_generator_serves_one_batch_after_another(device):
    model = make_model(device, **MODELS["window"])
    generator = Generator(model, BYTES, 2)
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
    assert generate_batch(model, BYTES, ["x", "abc"], max_tokens=40)[1] == many[1]
    assert "".join(generate(model, BYTES, "abc", max_tokens=40, seed=1)) != alone


def test_no_token_is_from_the_padded_vocabulary(device):
    generator = Generator(make_model(device, vocab_size=1000), BYTES, 1, Sampling(top_k=0))
    assert max(token for [token] in generator.tokens([[97, 98]], 60)) < 256


def script(monkeypatch, *texts):
    """Let sample i of the next batch have the tokens of its text, then letters x."""
    steps = zip(*([*text, *[ord("x")] * 60] for text in texts), strict=False)
    choose = lambda *args: torch.tensor(next(steps))  # noqa: E731
    monkeypatch.setitem(Engine.tokens.__globals__, "choose", choose)


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
    assert len(list(generator.stream(["", "p"], 30))) == 4 + 14  # both end, so nothing more is computed
    assert generator.prompt_tokens == 2 and generator.new_tokens == 3 + 13


@pytest.mark.parametrize(
    "stop, expected",
    [
        ([], "to be or END not"),
        ("END", "to be or "),
        (["ENDS", "notable"], "to be or END not"),
        (["ND", "or E", "zz"], "to be "),
        (["not"], "to be or END "),
    ],
)
def test_a_sample_ends_before_a_stop_text(monkeypatch, stop, expected):
    """And only that sample of its batch."""
    script(monkeypatch, b"to be or END not", b"to be or to be or")
    samples = generate_batch(make_model("cpu"), BYTES, ["a", "b"], max_tokens=16, stop=stop)
    assert samples == [expected, "to be or to be o"]


def test_streamed_text_has_whole_characters(monkeypatch):
    text = "naïve 🌊 waves"
    script(monkeypatch, text.encode() + b"\xc3")
    pieces = list(generate(make_model("cpu"), BYTES, "a", max_tokens=len(text.encode()) + 1))
    assert "".join(pieces) == text + "\ufffd" and len(pieces) == len(text) + 1


def test_mistakes(device):
    model, char = make_model(device), make_tokenizer("char", "abc")
    for call, words in [
        (lambda: generate_batch(model, char, ["ab", "ax"]), "no token for 'x'"),
        (lambda: generate_batch(model, char, ["ab", ""]), "the prompt is empty"),
        (lambda: generate_batch(model, char, "abc"), "prompts is one text"),
        (lambda: generate_batch(model, char, ["ab"], top_p=0.0), "top_p=0.0"),
        (lambda: list(Generator(model, char, 2).stream(["ab"])), "1 prompts for 2 samples"),
        (lambda: Generator(make_model(device).train(), char), "model.eval()"),
    ]:
        with pytest.raises(ValueError) as error:
            call()
        assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton exists for Linux only")
@pytest.mark.parametrize("options", [{}, dict(top_k=0), dict(top_k=0, min_p=0.01), dict(temperature=1e-30)])
def test_the_kernel_has_the_same_scores(device, options):
    """As choose() computes them on a CPU; logarithms may differ by a rounding."""
    from generation.gumbel import gumbel_scores

    logits = torch.randn(4, 5_003)
    sampling, keys, positions = Sampling(**options), sample_keys(3, torch.arange(4)), torch.arange(4) + 7
    best, least = logits.amax(1, keepdim=True), logits.topk(sampling.top_k).values[:, -1:] if sampling.top_k else None
    log_min_p = math.log(sampling.min_p) if sampling.min_p else -math.inf
    arguments = (x if x is None else x.to(device) for x in (logits, best, least, keys, positions))
    scores = gumbel_scores(*arguments, sampling.temperature, log_min_p).cpu()[:, :-1]
    expected = (logits - best) / sampling.temperature
    hidden = (expected < log_min_p) | (logits < (-math.inf if least is None else least))
    expected -= exponential(mix(keys + positions)[:, None], torch.arange(5_003)).log()
    torch.testing.assert_close(scores, expected.masked_fill(hidden, -math.inf), rtol=1e-6, atol=1e-6)
    assert torch.equal(scores.argmax(1), choose(logits, sampling, keys, positions))


@pytest.mark.skipif(not HAS_TRITON, reason="Triton exists for Linux only")
@pytest.mark.parametrize("vocabulary, k", [(5_003, 200), (5_003, 1), (5_003, 256), (300, 200), (64, 64), (7, 3)])
def test_kth_largest(vocabulary, k, device):
    """Exactly: random logits, many equal ones, hidden ones, and all large ones in one chunk."""
    from generation.top_k import best_and_kth

    logits = torch.randn(4, vocabulary + 5, device=device)[:, :vocabulary]
    logits[1] = logits[1].mul(2).round()
    logits[2, logits[2] < 1] = -math.inf
    logits[3] = torch.arange(vocabulary, 0, -1, device=device) / 7 - 100
    best, kth = best_and_kth(logits, k)
    assert torch.equal(best, logits.amax(1, keepdim=True))
    assert torch.equal(kth, logits.topk(k).values[:, -1:])


@pytest.mark.parametrize(
    "kernels", [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_TRITON, reason="Linux"))]
)
@pytest.mark.parametrize(
    "options",
    [{}, dict(top_k=5), dict(top_k=0), dict(top_p=0.9), dict(top_k=1, top_p=0.9), dict(min_p=0.1), dict(temperature=0)],
)
def test_rows_without_probabilities_have_no_token(options, kernels, device, monkeypatch):
    """NaN of either sign, or -inf alone; the other rows of the batch have the same tokens as without these."""
    monkeypatch.setattr(choose_module, "has_kernels", lambda logits: kernels)
    logits, sampling = torch.randn(6, 300, device=device), Sampling(**options)
    keys, positions = (torch.arange(6, device=device) + i for i in (0, 9))
    tokens = choose(logits, sampling, keys, positions)
    logits[0, 77], logits[2, 299], logits[3], logits[5] = math.nan, -math.nan, math.nan, -math.inf
    logits[4, :299] = -math.inf
    tokens[[0, 2, 3, 5]], tokens[4] = 300, 299
    assert torch.equal(choose(logits, sampling, keys, positions), tokens)
    bad = logits[[0, 0]]  # no row has a probability
    assert choose(bad, sampling, keys[:2], positions[:2]).tolist() == [300, 300]


@pytest.mark.parametrize("graph", GRAPH)
@pytest.mark.parametrize("options", [{}, dict(top_k=0), dict(temperature=0)])
def test_nan_is_one_sentence(options, graph, device):
    """From the token on that the context of one sample makes NaN."""
    model = make_model(device, tie_head=False)
    model.embed.weight.data[126] = math.nan
    for name in ("the model", "run.pt, step 3,"):
        with pytest.raises(UserError, match=f"^{name} computes .*NaN for token 3 of sample 2"):
            generate_batch(model, BYTES, ["ab", "a~"], max_tokens=9, **options)
        model.source = "run.pt, step 3,"
    with pytest.raises(UserError, match="token 2 of sample 1"):
        list(generate(model, BYTES, "~", **options))
    generator = Generator(model, BYTES, sampling=Sampling(**options), graph=graph)
    with pytest.raises(UserError, match="token 2 of sample 1"):
        list(generator.stream(["~"]))
    assert len(list(generator.tokens([[5]], 3))) == 3  # the next text is computed as ever


def test_choices_follow_the_probabilities(device):
    """Frequencies over samples, and over positions, are within 5 standard deviations."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.049, 0.001], device=device)
    count, one = 20_000, Sampling(temperature=1.0, top_k=0)
    numbers, fixed = torch.arange(count, device=device), torch.full((count,), 7, device=device)
    logits = probabilities.log().expand(count, -1)
    for seed, keys, positions in ((0, numbers, fixed), (0, fixed, numbers), (1, numbers, fixed)):
        chosen = choose(logits, one, sample_keys(seed, keys), positions)
        share = torch.bincount(chosen, minlength=5) / count
        assert ((share - probabilities).abs() <= 5 * (probabilities / count).sqrt()).all(), share
    # choices at neighbouring positions are independent
    before, after = (choose(logits, one, sample_keys(0, fixed), numbers + shift) for shift in (0, 1))
    both = ((before == 0) & (after == 0)).float().mean().item()
    assert abs(both - 0.25) < 5 * (0.25 / count) ** 0.5


def test_filters(device):
    """The tokens that can be chosen, with probabilities 0.5, 0.3, 0.15 and 0.05 in a shuffled order."""
    logits = torch.log(torch.tensor([[0.15, 0.5, 0.05, 0.3]], device=device)).expand(400, -1)
    keys, positions = sample_keys(0, torch.arange(400, device=device)), torch.zeros(400, dtype=torch.int64).to(device)

    def support(**options):
        sampling = Sampling(**dict(temperature=1.0, top_k=0) | options)
        return set(choose(logits, sampling, keys, positions).tolist())

    assert support() == {0, 1, 2, 3}
    assert support(top_k=2) == {1, 3} and support(top_k=1) == {1} and support(top_k=9) == {0, 1, 2, 3}
    assert support(top_p=0.7) == {1, 3} and support(top_p=0.01) == {1} and support(top_k=2, top_p=0.6) == {1}
    assert support(min_p=0.2) == {0, 1, 3} and support(min_p=1.0) == {1} and support(min_p=0.2, top_p=0.7) == {1, 3}
    assert support(temperature=0) == {1} and support(temperature=1e-30) == {1}
    equal = torch.tensor([[1.0, 0.0, 1.0, 2.0, 1.0]], device=device).expand(400, -1)
    for limit in (dict(top_k=2), dict(top_k=0, top_p=0.5), dict(top_k=3, top_p=0.7)):
        chosen = choose(equal, Sampling(temperature=1.0, **limit), keys, positions)
        assert set(chosen.tolist()) == {0, 2, 3, 4}  # the filter takes all of equal logits or none
