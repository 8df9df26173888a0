"""training/weights.py and export.py: odd, incomplete and wrong models, and missing packages."""

import json
import shutil
import sys
from functools import partial

import pytest
import torch
from helpers import contents, one_sentence
from test_weights import gpt2, make_run

from data import make_tokenizer
from sample import load
from training import weights
from training.checkpoint import save_checkpoint
from training.export import export
from training.tasks import read_task


@pytest.mark.parametrize("name", ["vocab_size", "n_positions", "n_layer", "n_head", "n_embd"])
@pytest.mark.parametrize("value", [[12], "12", 12.0, True, None, 0, {}], ids=str)
def test_odd_sizes_in_a_config_file(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"x: {name}=.* must be a positive int"):
        weights._config_of_gpt2({"model_type": "gpt2", name: value}, "x")


@pytest.mark.parametrize("value", [[12], "12", 12.5, {}], ids=str)
def test_odd_options_in_a_config_file(value):
    for name in ("activation_function", "layer_norm_epsilon", "n_inner", "tie_word_embeddings", "model_type"):
        with pytest.raises(ValueError, match=r"^x.* only "):
            weights._config_of_gpt2({"model_type": "gpt2", name: value}, "x")


def test_weights_in_several_files(folder):
    theirs = gpt2(folder / "whole")
    theirs.save_pretrained(folder / "parts", max_shard_size="50KB")
    assert len(list((folder / "parts").glob("*.safetensors"))) > 2
    whole, parts = (weights.read(name).weights for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("name", ["blocks.1.mlp.expand.weight", "norm.bias"])
def test_a_checkpoint_without_one_of_its_weights(folder, name):
    """Only the biases of a network without biases are zeros in an export."""
    make_run(folder / "runs/x", make_tokenizer("bytes"), bias=True)
    path = folder / "runs/x/best.pt"
    checkpoint = contents(path)
    del checkpoint["model"][name]
    save_checkpoint(path, checkpoint)
    for function in (weights.load_model, partial(export, folder="out")):
        with pytest.raises(ValueError, match=f"other weights than its network, such as .*{name}"):
            function("runs/x")
    assert not (folder / "out").exists()


def test_packages_that_are_not_installed(folder, monkeypatch, data_root):
    gpt2(folder / "tiny")
    make_run(folder / "runs/x", make_tokenizer("bytes"))
    for package, function, *arguments in (
        ("safetensors", weights.read, "tiny"),
        ("safetensors", export, "runs/x", "out"),
        ("huggingface_hub", weights.read, "gpt2"),
        ("pyarrow", read_task, "items.parquet"),
    ):
        (folder / "items.parquet").touch()
        with monkeypatch.context() as patch:
            for module in (package, f"{package}.torch"):
                patch.setitem(sys.modules, module, None)
            with pytest.raises(
                ValueError, match=rf"needs the package {package}; install it: pip install -e '\.\[hub\]'"
            ):
                function(*arguments)


def test_mistakes(folder, run):
    gpt2(folder / "tiny")
    make_run(folder / "runs/x", make_tokenizer("bytes"), block_size=16)
    export("runs/x", "out")
    shutil.copytree("out", "other")
    (folder / "other/kestrel.json").unlink()
    (folder / "other/config.json").write_text(json.dumps({"model_type": "mamba"}))
    shutil.copytree("tiny", "cut")
    (folder / "cut/model.safetensors").write_bytes((folder / "tiny/model.safetensors").read_bytes()[:5000])
    shutil.copytree("tiny", "wide")
    config = json.loads((folder / "tiny/config.json").read_text())
    (folder / "wide/config.json").write_text(json.dumps(config | {"n_embd": 96}))
    shutil.copytree("tiny", "deep")
    (folder / "deep/config.json").write_text(json.dumps(config | {"n_layer": 4}))
    shutil.copytree("tiny", "shallow")
    (folder / "shallow/config.json").write_text(json.dumps(config | {"n_layer": 2}))
    shutil.copytree("out", "newer")
    (folder / "newer/kestrel.json").write_text(json.dumps({"network": {"new": 1}, "tokenizer": {}}))
    shutil.copytree("tiny", "swish")
    (folder / "swish/config.json").write_text(json.dumps(config | {"activation_function": "silu"}))
    own = json.loads((folder / "out/kestrel.json").read_text())
    for name, change in (("glu", {"mlp": "glu"}), ("text", {"n_layer": "2"})):
        shutil.copytree("out", name)
        (folder / name / "kestrel.json").write_text(json.dumps(own | {"network": own["network"] | change}))
    shutil.copytree("out", "torn")
    (folder / "torn/kestrel.json").write_text('{"network": ')
    for name in ("pickled", "parts"):
        shutil.copytree("tiny", name)
        (folder / name / "model.safetensors").unlink()
    (folder / "pickled/pytorch_model.bin").touch()
    (folder / "parts/model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    (folder / "bare").mkdir()
    shutil.copy("tiny/model.safetensors", "bare")
    (folder / "empty").mkdir()
    for name, *parts in (
        ("empty", "empty has no checkpoint and no model.safetensors", "download"),
        ("bare", "bare/config.json cannot be read"),
        ("other", "other holds a mamba model", "gpt2"),
        ("cut", "model.safetensors is damaged"),
        ("wide", "transformer.wte.weight", "[97, 48]", "[97, 96]"),
        ("deep", "lacks transformer.h.3.ln_1.weight"),
        ("shallow", "more layers than the 2"),
        ("newer", "kestrel.json is damaged or from another version", "'new'"),
        ("torn", "torn/kestrel.json cannot be read"),
        ("glu", "glu/kestrel.json", "mlp='glu' must be gelu or"),
        ("text", "text/kestrel.json", "n_layer='2' must be int"),
        ("pickled", "pickled has only pytorch_model.bin", "safetensors"),
        ("parts", "cannot read parts/model-2.safetensors"),
        ("swish", "activation_function=silu"),
        ("nowhere", "nowhere does not exist", "gpt2-xl"),
    ):
        with pytest.raises((ValueError, OSError)) as error:
            weights.read(name)
        assert all(part in str(error.value) for part in parts), error.value
    with pytest.raises(ValueError, match="tiny has an unknown tokenizer"):
        load("tiny", "cpu")
    for source, target, reason in (("runs/x", "out", "out exists"), ("out", "new", "Hugging Face model already")):
        with pytest.raises(ValueError, match=reason):
            export(source, target)
    for options, *parts in (
        (dict(n_layer=3), "n_layer=3", "have 2", "leave n_layer out"),
        (dict(block_size=64), "block_size=64", "have 16"),
        (dict(tokenizer="char"), "another tokenizer (char)"),
    ):
        code, err = run(**dict(init_from="out", n_embd=64, n_head=4, block_size=16) | options)
        assert code == 1
        one_sentence(err, *parts)
