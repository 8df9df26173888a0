"""weights.py, hf/ and export.py: GPT-2's weights in, Hugging Face folders out, against the package transformers."""

import json
import os
import sys
from dataclasses import make_dataclass

import pytest
import torch
from helpers import contents, equal, in_process, losses, make_gpt2_small, refused, save_model
from hub_server import files_of, running

import hf.read
import weights
from data.chat import with_turns
from data.files import find_run
from data.tokenizer import GPT2_PATTERN, _encoding, end_of_text, is_char, make_tokenizer, to_state
from errors import UserError
from export import export
from model import GPT, GPTConfig
from sample import generate, load
from training.network import load_pretrained

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

TEXT = "It's 1,234,567 o'clock -- we'll   wait\n\n\tfor them!  Naïve 東京 🙂🙂 and then\r\n  they'RE HERE... 12 345\n "
SMALL = dict(block_size=32, n_layer=2, n_head=4, n_embd=64)
MODERN = dict(position="rope", norm="rmsnorm", mlp="swiglu")
NANOCHAT = MODERN | dict(mlp="relu2", qk_norm=True, norm_weight=False, embed_norm=True)
SQUARED = MODERN | dict(mlp="relu2", qk_norm=True, logit_softcap=1.5)
RECIPE = SQUARED | dict(norm_weight=False, embed_skip=True, value_residual=True, key_offset=True)
NETWORKS = {  # options of GPTConfig, and the architecture
    "classic": ({}, "GPT2LMHeadModel"),
    "with biases": (dict(bias=True, mlp="gelu_tanh", tie_head=False), "GPT2LMHeadModel"),
    "llama": (MODERN | dict(n_kv_head=2, tie_head=False), "LlamaForCausalLM"),
    "qwen": (MODERN | dict(qk_norm=True), "Qwen3ForCausalLM"),
    "no norm weights": (MODERN | dict(norm_weight=False, qk_norm=True, n_kv_head=1), "Qwen3ForCausalLM"),
    "arcee": (MODERN | dict(mlp="relu2", n_kv_head=2, tie_head=False), "ArceeForCausalLM"),
    "nanochat": (NANOCHAT | dict(logit_softcap=1.5, n_kv_head=1), "NanoChatForCausalLM"),
    "no softcap": (NANOCHAT | dict(tie_head=False), "NanoChatForCausalLM"),
    "recipe": (RECIPE, "KestrelForCausalLM"),
    "windows": (SQUARED | dict(window=8, n_layer=5, n_kv_head=2, tie_head=False), "KestrelForCausalLM"),
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
    save_model(folder / "best.pt", model, tokenizer)
    return model


def small_tokenizer(spec):
    """A tokenizer of TEXT, or one with GPT-2's pattern."""
    if spec != "gpt2's pattern":
        return make_tokenizer(spec, [TEXT * 9], many_documents=True)
    tokens = list(make_tokenizer("bpe:400", [TEXT * 9])._mergeable_ranks)
    return _encoding("gpt2", GPT2_PATTERN, tokens, ends=True)


def assert_close(found, expected):
    """Within float32 rounding."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("form", ["folder", "parts", "OpenAI's", "untied"])
def test_logits_of_gpt2(tmp_path, form):
    """From a folder, several files, or as OpenAI's file: without a prefix, with masks."""
    options = dict(activation_function="gelu", tie_word_embeddings=False, n_inner=192) if form == "untied" else {}
    theirs, path = gpt2(tmp_path, **options), tmp_path
    if form == "parts":
        path = tmp_path / "parts"
        theirs.save_pretrained(path, max_shard_size="50KB")
        assert len(list(path.glob("*.safetensors"))) > 2
    elif form == "OpenAI's":
        path = tmp_path / "model.safetensors"
        tensors = {name.removeprefix("transformer."): value for name, value in safetensors.load_file(path).items()}
        safetensors.save_file(tensors | {"h.0.attn.bias": torch.ones(1)}, path)
    tokens = torch.randint(97, (3, 32))
    found = weights.read(str(path))
    ours = GPT(found.config).eval()
    ours.load_state_dict(found.weights)
    assert_close(ours(tokens), theirs(tokens).logits)


@pytest.mark.parametrize("network", NETWORKS)
def test_transformers_computes_the_same_logits_and_text(folder, network):
    options, architecture = NETWORKS[network]
    tokenizer = make_tokenizer("bpe:300", [TEXT * 9], many_documents=True)
    model = make_run(folder / "runs/x", tokenizer, **options)
    export("runs/x", "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained("out", trust_remote_code=True).eval()
    assert type(theirs).__name__ == architecture
    tokens, count = torch.randint(tokenizer.n_vocab, (2, 32)), tokenizer.n_vocab
    assert_close(theirs(tokens).logits, model(tokens)[..., :count])

    again, same, contents = load("out", "cpu")
    assert_close(again(tokens), model(tokens)[..., :count])
    assert to_state(same) == to_state(tokenizer) and str(contents["path"]) == "out/model.safetensors"
    read = transformers.AutoTokenizer.from_pretrained("out", trust_remote_code=True)
    prompt = "It's naïve"
    text = theirs.generate(**read(prompt, return_tensors="pt"), max_new_tokens=20, do_sample=False)
    ours = prompt + "".join(generate(again, tokenizer, prompt, max_tokens=20, temperature=0))
    assert read.decode(text[0], skip_special_tokens=True) == ours


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("options", [dict(window=8, key_offset=False), dict(key_offset=True)], ids=str)
def test_the_modeling_file_pads_caches_and_saves(folder, attention, options):
    """A row with padding on the left gets the text of the row alone, and what Transformers saves is read again."""
    tokenizer = make_tokenizer("bytes")
    model = make_run(folder / "runs/x", tokenizer, **RECIPE | dict(n_layer=5, n_kv_head=2, norm_weight=True) | options)
    export("runs/x", "out")
    load_theirs = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load_theirs("out", trust_remote_code=True, attn_implementation=attention).eval()
    assert theirs.is_backend_compatible()  # what vLLM asks
    tokens = torch.randint(256, (2, 12))
    expected = model(tokens)[..., :256]
    assert_close(theirs(tokens).logits, expected)
    first = theirs(tokens[:, :9], use_cache=True)
    assert_close(theirs(tokens[:, 9:], past_key_values=first.past_key_values).logits, expected[:, 9:])
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    assert_close(theirs(tokens, attention_mask=mask).logits[1, 5:], model(tokens[1:, 5:])[0, :, :256])
    options = dict(max_new_tokens=15, do_sample=False)
    both = theirs.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(both[1:, 5:], theirs.generate(tokens[1:, 5:], **options))
    assert torch.equal(both[:1], theirs.generate(tokens[:1], **options))
    fixed = dict(cache_implementation="static", disable_compile=True)
    assert torch.equal(both, theirs.generate(tokens, attention_mask=mask, **fixed, **options))

    loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(theirs(tokens, labels=tokens).loss, loss)
    theirs.save_pretrained("again")
    (folder / "out/tokenizer.json").rename(folder / "again/tokenizer.json")
    found, ours = weights.read("again"), weights.read("out")
    assert found.config == ours.config and equal(found.weights, ours.weights)


@pytest.mark.parametrize("spec", ["char", "char+eot", "bytes", "bytes+eot", "bpe:400", "gpt2's pattern"])
def test_transformers_makes_the_same_tokens(folder, spec):
    tokenizer = small_tokenizer(spec)
    make_run(folder / "runs/x", tokenizer)
    export("runs/x", "out")
    theirs = transformers.AutoTokenizer.from_pretrained("out")
    for text in (TEXT, TEXT[::-1], " ", "\n", "the 12345 or\n\n\nso"):
        text = "".join(c for c in text if c in TEXT) if is_char(tokenizer) else text
        assert theirs.encode(text) == tokenizer.encode_ordinary(text)
        assert theirs.decode(theirs.encode(text)) == text
    end = end_of_text(tokenizer)
    assert len(theirs) == tokenizer.n_vocab and theirs.eos_token_id == end
    assert end is None or theirs.encode("o<|endoftext|>o") == [*theirs.encode("o"), end, *theirs.encode("o")]


def test_float16_has_half_the_size(folder):
    model = make_run(folder / "runs/x", make_tokenizer("bytes"), **MODERN)
    export("runs/x", "out", "float16")
    assert transformers.AutoModelForCausalLM.from_pretrained("out").dtype == torch.float16
    found = weights.read("out").weights
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value[: len(found[name])].half().float())


REFUSED = [  # options that are allowed, and those of which each is not
    ({}, dict(logit_softcap=15.0, window=8, n_kv_head=2, mlp="relu2", mask_documents=True, embed_norm=True)),
    (MODERN, dict(embed_skip=True, value_residual=True, key_offset=True, bias=True, logit_softcap=15.0)),
    (MODERN | dict(qk_norm=True), dict(window=8)),
    *((options, dict(mlp=kind)) for options in (MODERN, MODERN | dict(qk_norm=True), NANOCHAT)
      for kind in ("gelu", "gelu_tanh")),
    (NANOCHAT, dict(norm_weight=True)),
    (RECIPE, dict(mlp="gelu", window=8, norm="layernorm", mask_documents=True, embed_norm=True)),
]  # fmt: skip
NEW = "transformer.h.0.attn.c_attn.weight_scale"  # of quantized weights
REFUSED = [(allowed, {name: value}) for allowed, wrong in REFUSED for name, value in wrong.items()]


@pytest.mark.parametrize("allowed, wrong", REFUSED, ids=str)
def test_a_network_that_transformers_lacks_is_named_and_nothing_is_written(folder, allowed, wrong):
    make_run(folder / "runs/x", make_tokenizer("bytes"), **allowed | wrong)
    [(name, value)] = wrong.items()
    with pytest.raises(UserError, match=f"^{name}={value} cannot be exported: .*; train one with --{name} [^ ]*$"):
        export("runs/x", "out")
    with pytest.raises(UserError, match=r"cannot be (exported|written as GGUF): .*; train"):
        export("runs/x", "out.gguf")
    assert not list(folder.glob("*out*"))


def test_an_option_that_no_list_names_is_not_exported(folder, monkeypatch):
    """Whatever its value: nobody has said what its effect would be in Transformers or llama.cpp."""
    scaled = make_dataclass("Scaled", [("branch_scale", float, 1.0)], bases=(GPTConfig,), frozen=True, kw_only=True)
    monkeypatch.setattr(hf.read, "GPTConfig", scaled)
    for options, _ in NETWORKS.values():
        config = scaled(**SMALL | dict(vocab_size=256) | options)
        save_model(folder / "runs/x/best.pt", GPT(config), make_tokenizer("bytes"))
        for path in ("out", "out.gguf"):
            with pytest.raises(UserError, match=r"^branch_scale cannot be"):
                export("runs/x", path)
    assert not list(folder.glob("*out*"))


def test_training_from_weights(folder, run, capsys):
    """It begins with the loss of the weights, on a shorter context; the options of their network need not be given."""
    assert run(name="first", bias=True, mlp="gelu_tanh")[0] == 0
    export("runs/first", "out")
    options = dict(data="text", input="corpus.txt", tokenizer="bytes", device="cpu", steps=1, batch_size=8, log_every=1)
    for source in ("out", "runs/first", "runs/first/best.pt", "out/model.safetensors"):
        name = source.replace("/", "-")
        assert in_process(capsys, **options, init_from=source, name=name, block_size=16).returncode == 0
        assert losses(folder, name)[0] < losses(folder, "first")[0] / 2


def test_training_on_another_text_with_the_tokenizer_of_a_run(folder, run, capsys):
    assert run(name="first", tokenizer="bpe:300", steps=4)[0] == 0
    (folder / "other.txt").write_text("what has taken the sea. " * 300)
    options = dict(data="text", input="other.txt", device="cpu", batch_size=8, eval_every=2, steps=2)
    options["init_from"] = "runs/first"

    def tune(*argv, **changes):
        result = in_process(capsys, *argv, **options | changes)
        return result.returncode, result.stderr

    assert tune(name="second")[0] == 0
    first, second = (contents(folder / f"runs/{name}/checkpoint.pt") for name in ("first", "second"))
    assert second["tokenizer"] == first["tokenizer"]
    refused(tune(name="third", tokenizer="bytes"), "give --tokenizer run:runs/first")
    (folder / "runs/first").rename(folder / "gone")
    assert tune("--resume", "runs/second", "--steps", "4", "--allow_changes")[0] == 0


@pytest.mark.parametrize("name, expected", [
    ("gpt2", "hub"), ("runs/gpt2", "runs/gpt2"), ("./gpt2", "gpt2"), ("gpt2/", "gpt2"), ("theirs", "theirs"),
    ("mine", "runs/mine"), ("runs/mine", "runs/mine"), ("./mine", "mine"), ("mine/best.pt", "mine"),
])  # fmt: skip
def test_all_commands_mean_the_same_model_by_a_name(folder, monkeypatch, capsys, data_root, name, expected):
    """Folders in the working directory are called like runs, and both like OpenAI's model; all commands call read()."""
    make_gpt2_small(monkeypatch)
    gpt2(folder / "hub", vocab_size=257, n_layer=1)
    files = files_of(folder / "hub")
    layers = {"hub": 1, "runs/gpt2": 2, "gpt2": 3, "runs/mine": 4, "mine": 5, "theirs": 6}  # tell them apart
    for path in [*layers][1:]:
        make_run(folder / path, made := make_tokenizer(f"bpe:{256 + layers[path]}", [TEXT * 9]), n_layer=layers[path])
        (folder / path / "kestrel.json").write_text(json.dumps({"tokenizer": to_state(made)}))
    with running(monkeypatch, folder, {"openai-community/gpt2": files}):
        capsys.readouterr()
        found = weights.read(name)
        assert ("runs/gpt2" in capsys.readouterr().err) == (name == "gpt2")  # a note says how to reach that run
        assert found.config.n_layer == layers[expected]
        for spec in (weights.network_options(name)["tokenizer"], f"run:{name}"):
            assert to_state(make_tokenizer(spec)) == to_state(found.tokenizer)
        if name == "gpt2":
            with pytest.raises(UserError, match="is runs/gpt2"):
                find_run(name)  # of plot.py and --resume, which need a run
        elif name != "mine/best.pt":
            assert find_run(name).resolve() == folder / expected


def test_weights_of_the_hub(folder, monkeypatch, data_root):
    gpt2(folder / "tiny")
    files = files_of(folder / "tiny")
    with running(monkeypatch, folder, {"openai-community/gpt2": files}) as server:
        found, local = weights.read("gpt2"), weights.read("tiny")
        assert found.config == local.config and equal(found.weights, local.weights)
        assert sorted(server.downloads) == sorted(files)
        server.mode = "error"
        assert weights.read("gpt2").config == local.config  # which is there
        server.requests.clear()
        with pytest.raises(UserError, match="cannot download openai-community/gpt2-medium"):
            weights.read("gpt2-medium")
        assert len(server.requests) == 1  # it does not try again for half a minute
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"needs the package huggingface_hub; install it: .*\[hub\]"):
        weights.read("gpt2")


@pytest.mark.parametrize(
    "model, change, words",
    [
        ("tiny", {"model_type": "mamba"}, ["holds a mamba model", "gpt2"]),
        ("tiny", {"activation_function": "silu"}, ["activation_function=silu", "only"]),
        ("tiny", {"n_embd": [12]}, ["n_embd=[12] must be int"]),
        ("tiny", {"n_embd": 96}, ["transformer.wte.weight", "[97, 48]", "[97, 96]"]),
        ("tiny", {"n_layer": 4}, ["lacks transformer.h.3.ln_1.weight"]),
        ("tiny", {"n_positions": None}, ["tiny/config.json lacks n_positions"]),
        ("out", {"network": {"new": 1}}, ["kestrel.json is damaged or from another version", "'new'"]),
    ],
)
def test_models_that_do_not_fit_their_options(folder, model, change, words):
    gpt2(folder / "tiny")
    make_run(folder / "runs/x", make_tokenizer("bytes"))
    export("runs/x", "out")
    file = folder / model / ("config.json" if model == "tiny" else "kestrel.json")
    options = json.loads(file.read_text()) | change
    file.write_text(json.dumps({name: value for name, value in options.items() if value is not None}))
    with pytest.raises(UserError) as error:
        weights.read(model)
    assert all(word in str(error.value) for word in words), error.value


def test_mistakes(folder, run):
    gpt2(folder / "tiny")
    make_run(folder / "runs/x", make_tokenizer("bytes"), block_size=16)
    export("runs/x", "out")
    for name in ("empty", "runs/tiny2"):
        (folder / name).mkdir()
    tensors = safetensors.load_file("tiny/model.safetensors")
    safetensors.save_file(tensors | {NEW: torch.ones(1)}, "tiny/new.safetensors")
    os.truncate(folder / "tiny/model.safetensors", 5000)
    for function, arguments, words in (
        (weights.read, ["tiny/new.safetensors"], f"tiny/new.safetensors has {NEW}"),
        (weights.read, ["tiny"], "cannot read tiny/model.safetensors"),
        (weights.read, ["empty"], "no checkpoint and no model.safetensors in empty"),
        (weights.read, ["nowhere"], "nowhere does not exist"),
        (weights.read, ["tinny"], r"tinny does not exist \(perhaps tiny2\)"),
        (export, ["runs/x", "out"], "out exists"),
        (export, ["runs/x", "x.bin"], "x.bin .*gguf"),
        (export, ["out", "new"], "Hugging Face model already"),
    ):
        with pytest.raises(UserError, match=words):
            function(*arguments)
    given = dict(init_from="out", n_embd=64, n_head=4, block_size=16)
    refused(run(**given | dict(n_layer=3)), "n_layer=3", "have 2", "leave n_layer out")
    refused(run(**given | dict(block_size=64)), "block_size=64", "have 16")
    refused(run(**given | dict(tokenizer="char")), "another tokenizer (char)")


@pytest.mark.parametrize("rows", [0, 2, 20])
def test_weights_of_a_model_without_turns(folder, rows):
    """Rows of turns begin as the mean of the others, in a table that grows or has `rows` spare ones."""
    old, options = make_tokenizer("bytes"), dict(block_size=64, n_layer=1, n_head=1, n_embd=8, tie_head=rows == 2)
    config = GPTConfig(vocab_size=256 + rows, **options)
    saved = save_model(folder / "runs/x/best.pt", GPT(config), old)
    model = GPT(GPTConfig(vocab_size=max(261, 256 + rows), **options), seed=5)
    load_pretrained(model, "runs/x", with_turns(old))
    for key in ("embed.weight", "head.weight"):
        before, after = saved["model"][key], model.state_dict()[key]
        assert torch.equal(after[:256], before[:256]) and torch.equal(after[261:], before[261:])
        torch.testing.assert_close(after[256:261], before[:256].mean(0).expand(5, -1))
    with pytest.raises(UserError, match="the corpus has another tokenizer"):
        load_pretrained(model, "runs/x", with_turns(make_tokenizer("bpe:300", ["the sea " * 99])))
