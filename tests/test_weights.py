"""training/weights.py and export.py: GPT-2's weights in, Hugging Face folders out, against the package transformers."""

import json
from dataclasses import asdict

import pytest
import torch
from helpers import contents, in_process, losses, one_sentence
from hub_server import running
from huggingface_hub import constants

from data import end_of_text, make_tokenizer, to_state, tokenizer
from data.tokenizer import GPT2_PATTERN, CharTokenizer, _encoding
from data.tokenizer_json import vocabulary_of
from evaluate import evaluate_split
from model import GPT, GPTConfig
from sample import generate, load
from training import weights
from training.checkpoint import FORMAT, save_checkpoint
from training.export import export

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

TEXT = (
    """It's 1,234,567 o'clock -- we'll   wait\n\n\tfor them!  Naïve 東京 🙂🙂 and then\r\n  they'RE HERE... 12 345\n """
)
SIZES = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}
SMALL = dict(block_size=32, n_layer=2, n_head=4, n_embd=64)
MODERN = dict(position="rope", norm="rmsnorm", mlp="swiglu")
NETWORKS = {  # options of GPTConfig, and the architecture
    "classic": ({}, "GPT2LMHeadModel"),
    "with biases": (dict(bias=True, mlp="gelu_tanh", tie_head=False), "GPT2LMHeadModel"),
    "llama": (MODERN | dict(n_kv_head=2, tie_head=False), "LlamaForCausalLM"),
    "qwen": (MODERN | dict(qk_norm=True), "Qwen3ForCausalLM"),
    "relu2": (MODERN | dict(mlp="relu2"), "LlamaForCausalLM"),
    "no norm weights": (MODERN | dict(norm_weight=False, qk_norm=True), "Qwen3ForCausalLM"),
    "window": (MODERN | dict(qk_norm=True, window=5, n_layer=5), "Qwen3ForCausalLM"),
    "shakespeare": (MODERN | dict(mlp="relu2", qk_norm=True, n_kv_head=1), "Qwen3ForCausalLM"),
}


def loud(model):
    """The model with all weights changed, norms and biases too, so that each of them shows in the logits."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def gpt2(folder, **options):
    """Save a random GPT-2 of the package transformers to a folder; returns it."""
    small = dict(vocab_size=97, n_positions=32, n_embd=48, n_layer=3, n_head=3, bos_token_id=None, eos_token_id=None)
    model = loud(transformers.GPT2LMHeadModel(transformers.GPT2Config(**small | options)))
    model.save_pretrained(folder)
    return model


def make_run(folder, tokenizer, **options):
    """A run folder with a random network; returns the network."""
    model = loud(GPT(GPTConfig(**SMALL | dict(vocab_size=tokenizer.n_vocab + 7) | options)))
    contents = dict(format=FORMAT, config={}, model_config=asdict(model.config), model=model.state_dict(), step=3)
    folder.mkdir(parents=True)
    save_checkpoint(folder / "best.pt", contents | dict(tokenizer=to_state(tokenizer)))
    return model


def assert_close(found, expected):
    """Within float32 rounding."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(activation_function="gelu", tie_word_embeddings=False),
        dict(n_inner=192, activation_function="gelu_new"),
    ],
    ids=str,
)
def test_logits_of_gpt2(tmp_path, options):
    theirs = gpt2(tmp_path, **options)
    if options == {}:  # as OpenAI's file: without a prefix, with masks
        file = tmp_path / "model.safetensors"
        tensors = {n.removeprefix("transformer."): v for n, v in safetensors.load_file(file).items()}
        safetensors.save_file(tensors | {"h.0.attn.bias": torch.ones(1)}, file)
    tokens = torch.randint(97, (3, 32))
    for path in (tmp_path, tmp_path / "model.safetensors"):
        found = weights.read(str(path))
        ours = GPT(found.config).eval()
        ours.load_state_dict(found.weights)
        assert_close(ours(tokens), theirs(tokens).logits)


@pytest.mark.parametrize("name", SIZES)
def test_shapes_of_all_sizes(name, tmp_path):
    layers, heads, width = SIZES[name]
    config = transformers.GPT2Config(n_layer=layers, n_head=heads, n_embd=width)
    found = weights._config_of_gpt2(config.to_dict(), tmp_path)
    with torch.device("meta"):
        shapes = {n: tuple(p.shape) for n, p in transformers.GPT2LMHeadModel(config).named_parameters()}
    ours = {
        their: tuple(shape[::-1] if weights.is_transposed(their) else shape)
        for _, shape, their in weights.parameters_of(found)
    }
    assert ours == shapes and found.block_size == 1024


@pytest.mark.parametrize("network", NETWORKS)
def test_transformers_computes_the_same_logits_and_text(folder, network):
    options, architecture = NETWORKS[network]
    tokenizer = make_tokenizer("bpe:300", [TEXT * 9], many_documents=True)
    model = make_run(folder / "runs/x", tokenizer, **options)
    export("runs/x", "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained("out").eval()
    assert type(theirs).__name__ == architecture
    tokens, count = torch.randint(tokenizer.n_vocab, (2, 32)), tokenizer.n_vocab
    assert_close(theirs(tokens).logits, model(tokens)[..., :count])

    again, same, contents = load("out", "cpu")
    assert_close(again(tokens), model(tokens)[..., :count])
    assert to_state(same) == to_state(tokenizer) and str(contents["path"]) == "out/model.safetensors"
    read = transformers.AutoTokenizer.from_pretrained("out")
    prompt = "It's naïve"
    text = theirs.generate(**read(prompt, return_tensors="pt"), max_new_tokens=20, do_sample=False)
    ours = prompt + "".join(generate(again, tokenizer, prompt, max_tokens=20, temperature=0))
    assert read.decode(text[0], skip_special_tokens=True) == ours


@pytest.mark.parametrize("spec", ["char", "char+eot", "bytes", "bytes+eot", "bpe:400", "gpt2's pattern"])
def test_transformers_makes_the_same_tokens(folder, spec):
    if spec == "gpt2's pattern":
        tokens = list(make_tokenizer("bpe:400", [TEXT * 9])._mergeable_ranks)
        tokenizer = _encoding("gpt2", GPT2_PATTERN, tokens, {"<|endoftext|>": len(tokens)})
    else:
        tokenizer = make_tokenizer(spec, [TEXT * 9], many_documents=True)
    make_run(folder / "runs/x", tokenizer)
    export("runs/x", "out")
    theirs = transformers.AutoTokenizer.from_pretrained("out")
    for text in (TEXT, TEXT[::-1], " ", "\n", "the 12345 or\n\n\nso"):
        text = "".join(c for c in text if c in TEXT) if isinstance(tokenizer, CharTokenizer) else text
        assert theirs.encode(text) == tokenizer.encode_ordinary(text)
        assert theirs.decode(theirs.encode(text)) == text
    end = end_of_text(tokenizer)
    assert len(theirs) == tokenizer.n_vocab and theirs.eos_token_id == end
    assert end is None or theirs.encode("o<|endoftext|>o") == [*theirs.encode("o"), end, *theirs.encode("o")]


@pytest.mark.parametrize(
    "options, name",
    [
        (dict(logit_softcap=15.0), "logit_softcap=15.0"),
        (MODERN | dict(embed_skip=True), "embed_skip=True"),
        (MODERN | dict(value_residual=True), "value_residual=True"),
        (dict(window=8), "window=8"),
        (MODERN | dict(window=8), "window=8"),
        (MODERN | dict(qk_norm=True, window=1), "window=1"),
        (dict(n_kv_head=2), "n_kv_head=2"),
        (dict(qk_norm=True), "qk_norm=True"),
        (dict(mlp="relu2"), "mlp=relu2"),
        (dict(mask_documents=True), "mask_documents=True"),
        (MODERN | dict(logit_softcap=15.0, mlp="relu2"), "logit_softcap=15.0"),
        (MODERN | dict(bias=True), "bias=True"),
        (dict(position="rope"), "norm=layernorm"),
    ],
    ids=str,
)
def test_a_network_that_transformers_lacks_is_named_and_nothing_is_written(folder, options, name):
    make_run(folder / "runs/x", make_tokenizer("bytes"), **options)
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match=f"{name} cannot be exported"):
        export("runs/x", "out")
    assert sorted(folder.iterdir()) == before


def test_the_card_of_a_trained_model(folder, run):
    assert run(name="sea", input=folder / "corpus.txt")[0] == 0
    export("runs/sea", "out")
    card = (folder / "out/README.md").read_text()
    assert "text corpus.txt" in card and "tokens, 40 steps" in card and "bits per byte" in card
    assert "--n_embd 32" in card and "--input corpus.txt" in card and str(folder) not in card
    assert "began with | random weights |" in card and f"training loss | {losses(folder, 'sea')[-1]:.4f} nats" in card
    count = sum(parameter.numel() for parameter in load("runs/sea", "cpu")[0].parameters())
    assert f"| {count:,} parameters" in card  # without the zeros that stand for biases in GPT-2
    assert {path.name for path in (folder / "out").iterdir()} == {
        "README.md", "config.json", "generation_config.json", "kestrel.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip


def test_the_card_of_a_run_of_another_version(folder, run):
    """It has an option more and lacks one; what it began with is a name, and its input needs quotes."""
    (folder / "a text.txt").write_text("the sea keeps what the sea has taken. " * 200)
    assert run(name="first", steps=2)[0] == 0
    assert run(name="sea", steps=2, eval_every=2, init_from=folder / "runs/first", input="a text.txt")[0] == 0
    checkpoint = contents(folder / "runs/sea/best.pt")
    del checkpoint["config"]["muon_scale"]
    checkpoint["config"]["new"] = 1
    save_checkpoint(folder / "runs/sea/best.pt", checkpoint)
    export("runs/sea", "out")
    card = (folder / "out/README.md").read_text()
    assert "--input 'a text.txt'" in card and "--new" not in card and "began with | first |" in card


def test_training_from_weights(folder, run, capsys):
    """It begins with the loss of the weights, on a shorter context; the options of their network need not be given."""
    assert run(name="first", dropout=0.1, bias=True, mlp="gelu_tanh")[0] == 0
    export("runs/first", "out")
    options = dict(data="text", input="corpus.txt", tokenizer="bytes", device="cpu", steps=1, batch_size=8, log_every=1)
    for source in ("out", "runs/first", "runs/first/best.pt", "out/model.safetensors"):
        name = source.replace("/", "-")
        assert in_process(capsys, **options, init_from=source, name=name, block_size=16).returncode == 0
        assert losses(folder, name)[0] < losses(folder, "first")[0] / 2


@pytest.mark.parametrize("spec", ["char", "bpe:300"])
def test_training_on_another_text_with_the_tokenizer_of_a_run(folder, run, capsys, spec):
    assert run(name="first", tokenizer=spec)[0] == 0
    (folder / "other.txt").write_text("what has taken the sea. " * 300)
    options = dict(data="text", device="cpu", batch_size=8, log_every=1, eval_every=2, steps=2, init_from="runs/first")

    def tune(*argv, **changes):
        return in_process(capsys, *argv, **options | changes)

    result = tune(name="second", input="other.txt")
    assert result.returncode == 0, result.stderr
    first, second = (contents(folder / f"runs/{name}/checkpoint.pt") for name in ("first", "second"))
    assert second["tokenizer"] == first["tokenizer"]
    assert tune(name="same", input="corpus.txt").returncode == 0
    same = contents(folder / "runs/same/checkpoint.pt")
    assert same["tokens_sha256"] == first["tokens_sha256"]
    assert len(list((folder / "prepared/prepared").glob("text-*/manifest.json"))) == 2  # one for each text
    assert run(name="own", tokenizer=spec, input="other.txt", steps=2)[0] == 0  # learns a tokenizer from that text
    assert contents(folder / "runs/own/checkpoint.pt")["tokenizer"] != first["tokenizer"]
    for another in ("bytes", "bpe:400"):
        result = tune(name="third", input="other.txt", tokenizer=another)
        assert result.returncode == 1
        one_sentence(result.stderr, "give --tokenizer run:runs/first")

    (folder / "runs/first").rename(folder / "gone")
    assert tune("--resume", "runs/second", "--steps", "4", "--allow_changes").returncode == 0
    again = contents(folder / "runs/second/checkpoint.pt")
    assert again["step"] == 4 and again["tokenizer"] == first["tokenizer"]
    model, _, found = load("runs/second", "cpu")
    found["config"]["tokenizer"] = "run:runs/first"  # as it was until the run was resumed
    assert evaluate_split(model, found, "val", 32, 8)["tokens"] > 0


def test_weights_of_the_hub(folder, monkeypatch, data_root):
    gpt2(folder / "tiny")
    files = {name: (folder / "tiny" / name).read_bytes() for name in ("config.json", "model.safetensors")}
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    with running(monkeypatch, folder, {"openai-community/gpt2": files}) as server:
        found, local = weights.read("gpt2"), weights.read("tiny")
        assert found.config == local.config and found.weights.keys() == local.weights.keys()
        assert all(torch.equal(found.weights[name], local.weights[name]) for name in local.weights)
        assert sorted(server.downloads) == sorted(files)
        server.mode = "error"
        assert weights.read("gpt2").config == local.config  # which is there
        server.requests.clear()
        with pytest.raises(OSError, match="cannot download openai-community/gpt2-medium"):
            weights.read("gpt2-medium")
        assert len(server.requests) == 1  # it does not try again for half a minute


def test_only_gpt2s_vocabulary_gets_its_tokenizer(folder, monkeypatch):
    monkeypatch.setattr(tokenizer, "_gpt2_ranks", lambda path: [bytes([value]) for value in range(256)])
    monkeypatch.setattr(weights, "GPT2_VOCABULARY", 257)
    vocabulary = vocabulary_of(make_tokenizer("gpt2"))
    other = vocabulary | {"!": vocabulary['"'], '"': vocabulary["!"]}
    assert vocabulary["Ġ"] == ord(" ") and vocabulary["<|endoftext|>"] == 256
    for count, files, known in (
        (257, {}, True),
        (257, {"vocab.json": vocabulary}, True),
        (300, {"tokenizer.json": {"model": {"vocab": vocabulary}}}, True),
        (300, {}, False),
        (257, {"vocab.json": other}, False),
        (257, {"tokenizer.json": {"model": {"vocab": other}}}, False),
        (257, {"tokenizer.json": {"model": None}}, False),
    ):
        model = folder / f"{count}-{len(list(folder.iterdir()))}"
        gpt2(model, vocab_size=count, n_layer=1)
        for name, value in files.items():
            (model / name).write_text(json.dumps(value), encoding="utf-8")
        if known:
            assert weights.read_tokenizer(str(model)).name == "gpt2"
            assert load(str(model), "cpu")[0].config.vocab_size == count
        else:
            for function in (weights.read_tokenizer, weights.network_options, weights.load_model):
                with pytest.raises(ValueError, match="unknown tokenizer"):
                    function(str(model))
