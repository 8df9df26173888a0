"""The network: causality, grouped queries, learning, the loss, initialisation, the cache, and errors."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from generation.cache import Cache
from kernels.documents import find_documents
from model import GPT, GPTConfig
from training.checkpoint import empty_model

SMALL = dict(vocab_size=50, block_size=24, n_layer=2, n_head=4, n_embd=32)
MODERN = dict(norm="rmsnorm", position="rope", mlp="relu2", qk_norm=True, n_kv_head=2, tie_head=False)
CONFIGS = {
    "gpt2": GPTConfig(**SMALL, bias=True),
    "modern": GPTConfig(**SMALL, **MODERN, logit_softcap=15.0),
    "swiglu": GPTConfig(**SMALL, norm="rmsnorm", position="rope", mlp="swiglu", n_kv_head=1),
    "paths": GPTConfig(**SMALL, **MODERN, norm_weight=False, embed_skip=True, value_residual=True, window=7),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def config(request):
    return request.param


def make_model(config, seed=0):
    """An untrained network; what begins at 0 is drawn at random, so that it has an effect."""
    torch.manual_seed(seed)
    model = GPT(config, seed).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("skip", "share")):
            parameter.data.normal_(std=0.3)
    return model


@torch.no_grad()
def test_a_future_token_never_changes_a_past_logit(config):
    model = make_model(config)
    tokens = torch.randint(50, (1, 24))
    logits = model(tokens)
    for position in (1, 12, 23):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % 50
        other = model(changed)
        assert torch.equal(other[:, :position], logits[:, :position])
        assert not torch.equal(other[:, position:], logits[:, position:])


@torch.no_grad()
def test_grouped_queries_equal_repeated_heads():
    config = CONFIGS["modern"]
    grouped = make_model(config)
    full = make_model(dataclasses.replace(config, n_kv_head=None))
    weights = grouped.state_dict()
    D, H, G = config.head_dim, config.n_head, config.kv_heads
    for name, weight in weights.items():
        if name.endswith("qkv.weight"):
            q, k, v = weight.view(H + 2 * G, D, -1).split((H, G, G))
            k, v = (x.repeat_interleave(H // G, dim=0) for x in (k, v))
            weights[name] = torch.cat((q, k, v)).flatten(0, 1)
    full.load_state_dict(weights)
    tokens = torch.randint(50, (2, 24))
    torch.testing.assert_close(full(tokens), grouped(tokens))


def test_one_batch_overfits(config):
    model = make_model(config).train()
    tokens = torch.randint(50, (4, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    first = model(tokens[:, :-1], tokens[:, 1:])
    assert abs(first.item() - math.log(50)) < 0.3  # an untrained network knows nothing
    for _ in range(36):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


@torch.no_grad()
def test_cached_logits_equal_uncached(config):
    """Of two rows, of which one begins with fewer tokens than the other."""
    model = make_model(config)
    tokens, rows = torch.randint(50, (2, 24)), torch.arange(2)
    full = model(tokens)
    cache = Cache(config, 2, "cpu", torch.float32)
    found = model.logits(model.hidden(tokens[:, :9], cache.prefill(tokens[:, :9], rows, rows)))
    torch.testing.assert_close(found, full[:, :9])
    starts = torch.tensor([9, 5])
    cache.lengths.copy_(starts)
    for step in range(15):
        position = starts + step
        found = model.logits(model.hidden(tokens[rows, position, None], cache.step()))
        torch.testing.assert_close(found[:, 0], full[rows, position])


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_masked_documents_are_isolated(config, compiled):
    """Every document has the logits that it has alone, at the same positions."""
    masked = make_model(dataclasses.replace(config, mask_documents=True, end_of_text=0))
    alone = make_model(config)
    for p, q in zip(masked.parameters(), alone.parameters(), strict=True):
        q.copy_(p.normal_(std=0.2))
    tokens = torch.randint(1, 50, (3, 24))
    tokens[0, 9] = tokens[0, 10] = tokens[1, 23] = tokens[2, 0] = 0
    logits = (torch.compile(masked, fullgraph=True) if compiled else masked)(tokens)
    for row, begin, end in [(0, 0, 10), (0, 10, 11), (0, 11, 24), (1, 0, 24), (2, 0, 1), (2, 1, 24)]:
        expected = alone(tokens[row : row + 1, begin:end])[0]
        torch.testing.assert_close(logits[row, begin:end], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits[0, 11:], alone(tokens)[0, 11:], atol=1e-2)


def test_many_short_documents_share_the_last_place():
    """The number of places is fixed by the shape. No document reaches into another row."""
    tokens = torch.ones(2, 16, dtype=torch.long)
    tokens[0, :6] = 0  # six documents of a token; a row has places for three
    starts, positions = find_documents(tokens, 0)
    assert starts.tolist() == [0, 1, 2, 16, 32, 32, 32] and starts.dtype == torch.int32
    assert positions.tolist() == [[0, 0, *range(14)], [*range(16)]]


def test_gpt2_initialisation():
    model = GPT(GPTConfig(vocab_size=1000, block_size=64, n_layer=8, n_head=4, n_embd=128, bias=True))
    for name, p in model.named_parameters():
        if name.endswith("project.weight"):
            assert p.std().item() == pytest.approx(0.02 / 4, rel=0.1)
        elif p.dim() == 2:
            assert p.std().item() == pytest.approx(0.02, rel=0.1)
        elif name.endswith("bias"):
            assert (p == 0).all()
        else:
            assert (p == 1).all()
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("name", ["embed_skip", "value_residual", "window"])
def test_each_path_changes_the_network(name):
    """Without it the logits are others; with it a step changes the parameters that it adds."""
    config = CONFIGS["paths"]
    model, other = make_model(config), make_model(dataclasses.replace(config, **{name: GPTConfig.__dict__[name]}))
    other.load_state_dict(model.state_dict(), strict=False)
    tokens, targets = torch.randint(50, (2, 2, 24))
    assert not torch.allclose(model(tokens), other(tokens), atol=1e-4)
    model(tokens, targets).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


def test_the_window_is_that_of_three_of_four_blocks():
    """A token in a block with a window of 3 reaches the two after it, and all of them in the fourth block."""
    config = dataclasses.replace(CONFIGS["gpt2"], n_layer=4, window=3)
    for index, block in enumerate(make_model(config).blocks):
        x = torch.randn(1, 24, 32, requires_grad=True)
        block(x, None, x.detach(), [None] * 2, *[None] * 4)[0][0, 20].sum().backward()
        reached = (x.grad[0].abs().amax(1) > 0).nonzero().flatten().tolist()
        assert reached == ([18, 19, 20] if index < 3 else [*range(21)])


def test_embeddings_skip_to_each_block():
    """The first norm of a block gets (1 + a) x + b (embedding of the token), where x comes from the block before."""
    model = make_model(CONFIGS["paths"])
    tokens, given, left = torch.randint(50, (2, 24)), [], []
    for block in model.blocks:
        block.norm_1.register_forward_hook(lambda module, inputs, output: given.append(inputs[0]))
        block.register_forward_hook(lambda module, inputs, output: left.append(output[0]))
    model(tokens)
    embedded = model.embed(tokens)
    for block, x, found in zip(model.blocks, [embedded, *left[:-1]], given, strict=True):
        a, b = block.skip
        torch.testing.assert_close(found, (1 + a) * x + b * embedded)


def test_values_are_mixed_as_the_options_say():
    """A share of the first block's; keys and queries stay as they are."""
    model = make_model(CONFIGS["paths"])
    first, second = (block.attention for block in model.blocks)
    tokens = torch.randint(50, (2, 24))
    values, states = [], []
    layer = SimpleNamespace(attend=lambda q, k, v, window: values.append(v) or q)
    for block in model.blocks:
        block.norm_1.register_forward_hook(lambda module, given, output: states.append(output))
    model.hidden(tokens, (slice(24), [layer, layer]))
    own = [
        attention.qkv(x).split(attention.rows, -1)[2].view(2, 24, 2, 8)
        for attention, x in zip((first, second), states, strict=True)
    ]
    share = 0.5 + second.share
    torch.testing.assert_close(values, [own[0], (1 - share) * own[1] + share * own[0]])


def test_first_weights_depend_on_seed_and_name_only():
    """Not on what torch drew before, nor on the other parameters; matrices of one shape differ."""
    one, other = GPT(CONFIGS["gpt2"], 1).state_dict(), GPT(CONFIGS["gpt2"], 2).state_dict()
    torch.rand(7)
    deeper = GPT(dataclasses.replace(CONFIGS["gpt2"], n_layer=3, vocab_size=60), 1).state_dict()
    same = [name for name, weight in one.items() if "project.weight" not in name and weight.shape[0] != 50]
    assert len(same) > 10 and all(torch.equal(one[name], deeper[name]) for name in same)
    assert not torch.equal(one["embed.weight"], other["embed.weight"])
    assert not torch.equal(one["blocks.0.mlp.expand.weight"], one["blocks.1.mlp.expand.weight"])


def test_parameters_and_flops_of_gpt2():
    model = empty_model(
        GPTConfig(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768, bias=True), "meta"
    )
    assert sum(p.numel() for p in model.parameters()) == 124_439_808  # as released
    matmuls = 12 * 12 * 768**2 + 50257 * 768
    assert model.flops_per_token() == 6 * matmuls + 6 * 12 * 768 * 1024


def test_flops_of_a_window():
    """The pairs of query and key are a triangle of 24 x 24, from which a window of 5 cuts one of 19 x 19."""
    config = dataclasses.replace(CONFIGS["gpt2"], window=5)
    full, windowed = (empty_model(c, "meta").flops_per_token() for c in (CONFIGS["gpt2"], config))
    assert full - windowed == pytest.approx(2 * 12 * 32 * (19 * 19 / 2) / 24)


def test_dropout_only_while_training():
    model = make_model(dataclasses.replace(CONFIGS["modern"], dropout=0.5))
    tokens = torch.randint(50, (1, 24))
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_softcap_bounds_logits():
    model = make_model(CONFIGS["modern"])
    model.head.weight.data *= 1e4
    assert 14 < model(torch.randint(50, (1, 24))).abs().max() <= 15.0


@pytest.mark.parametrize("name", ["gpt2", "modern"])  # without and with a softcap
def test_the_loss_on_a_cpu_equals_that_of_the_gpu_kernel(name, device):
    """Value and all gradients; without a GPU, Triton's interpreter runs the kernel."""
    kernels = pytest.importorskip("kernels.cross_entropy", reason="Triton exists for Linux only")
    model, hidden = make_model(CONFIGS[name]), []
    model.head.weight.data *= 50  # so that logits reach the softcap
    model.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    tokens, targets = torch.randint(50, (2, 2, 24))
    plain = model(tokens, targets)
    arguments = (x.to(device) for x in (hidden[0].flatten(0, 1), model.head.weight, targets.flatten()))
    fused = kernels.linear_cross_entropy(*arguments, model.config.logit_softcap).cpu()
    torch.testing.assert_close(fused, plain)
    gradients = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in (fused, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5 * max(x.abs().max().item() for x in gradients[1]))


@pytest.mark.parametrize(
    "change",
    [
        dict(n_kv_head=3),
        dict(n_head=3),
        dict(n_head=8),
        dict(dropout=1.0),
        dict(logit_softcap=0.0),
        dict(n_layer=0),
        dict(window=0),
    ],
    ids=str,
)
def test_bad_configurations(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        GPTConfig(**SMALL | change)


def test_too_long_a_context():
    with pytest.raises(ValueError, match="block_size=24"):
        make_model(CONFIGS["gpt2"])(torch.zeros(1, 25, dtype=torch.int64))
