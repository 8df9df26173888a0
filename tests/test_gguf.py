"""hf/gguf.py, against the reader of the package gguf and, if it is installed, llama.cpp."""

import numpy as np
import pytest
import torch
from test_weights import MODERN, NANOCHAT, RECIPE, TEXT, assert_close, make_run, small_tokenizer

from data.tokenizer import is_char, make_tokenizer
from errors import UserError
from export import export
from hf.architectures import their_weights
from hf.tokenizer_json import letters_of
from model import RMSNORM_EPSILON
from weights import read

gguf = pytest.importorskip("gguf")

NETWORKS = {  # options of GPTConfig, and the tokenizer
    "gpt2": (dict(bias=True, mlp="gelu_tanh"), "gpt2's pattern"),
    "gpt2 untied": (dict(tie_head=False), "char+eot"),
    "llama": (MODERN | dict(n_kv_head=2, tie_head=False), "bpe:300"),
    "qwen3": (MODERN | dict(qk_norm=True, norm_weight=False), "bytes"),
    "arcee": (MODERN | dict(mlp="relu2", n_kv_head=2), "bpe:280"),
}


def make(folder, network):
    """Write model.gguf; returns (the network without its padding, tokenizer)."""
    options, spec = NETWORKS[network]
    tokenizer = small_tokenizer(spec)
    return make_run(folder / "runs/x", tokenizer, **options), tokenizer


def value_of(reader, key):
    return reader.fields[key].contents()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("network", NETWORKS)
def test_reading_back(folder, network, dtype):
    """All tensors, and the numbers that llama.cpp takes from the file."""
    model, tokenizer = make(folder, network)
    export("runs/x", "model.gguf", dtype)
    config, count, kind = model.config, tokenizer.n_vocab, network.split()[0]
    reader = gguf.GGUFReader("model.gguf")
    found = {tensor.name: torch.tensor(np.array(tensor.data)) for tensor in reader.tensors}
    expected = their_weights(read("runs/x").weights, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.n_layer)
    assert len(found) == len(expected)
    for key, value in expected.items():
        ours = found[names.get_name(key, (".weight", ".bias"))]
        if "token" in key or "wte" in key or "head" in key:
            value = value[:count]
        if ".c_" in key and value.dim() == 2:
            value = value.T
        if kind in ("llama", "arcee") and ("q_proj" in key or "k_proj" in key):  # each pair (i, i + D/2) side by side
            D = config.head_dim
            order = torch.tensor([i // 2 + i % 2 * (D // 2) for i in range(D)])
            value = value.view(-1, D, config.n_embd)[:, order].flatten(0, 1)
        assert ours.dtype == (getattr(torch, dtype) if value.dim() == 2 and "wpe" not in key else torch.float32)
        assert torch.equal(ours, value.to(ours.dtype)), key
    assert value_of(reader, "general.architecture") == kind
    numbers = dict(context_length=32, embedding_length=64, block_count=2, feed_forward_length=config.mlp_width)
    numbers["attention.head_count"] = 4
    if kind != "gpt2":
        numbers |= {"attention.head_count_kv": config.kv_heads, "rope.dimension_count": 16, "rope.freq_base": 10000.0}
        numbers |= {"attention.key_length": 16, "attention.value_length": 16}  # some readers do not derive them
        numbers["attention.layer_norm_rms_epsilon"] = pytest.approx(RMSNORM_EPSILON)
    assert {name: value_of(reader, f"{kind}.{name}") for name in numbers} == numbers

    texts = value_of(reader, "tokenizer.ggml.tokens")
    assert texts[:count] == texts and len(texts) == count
    ids = tokenizer.encode_ordinary(TEXT)
    assert "".join(texts[index] for index in ids) == letters_of(TEXT.encode())
    end = texts[value_of(reader, "tokenizer.ggml.eos_token_id")]
    assert end == ("<|endoftext|>" if tokenizer._special_tokens else letters_of(b"\xff"))


@pytest.mark.parametrize("network", NETWORKS)
def test_llama_cpp_computes_the_same_logits_and_text(folder, network):
    """It rounds GELU to float16 on a CPU. Its cache is float32 here."""
    llama_cpp = pytest.importorskip("llama_cpp")
    model, tokenizer = make(folder, network)
    export("runs/x", "model.gguf")
    settings = dict(n_ctx=32, logits_all=True, type_k=0, type_v=0, n_threads=1, verbose=False)
    theirs = llama_cpp.Llama("model.gguf", **settings)
    for text in (TEXT, TEXT[::-1], "  \n\n x", "I'LL we'Ve"):
        text = "".join(c for c in text if c in TEXT) if is_char(tokenizer) else text
        ids = tokenizer.encode_ordinary(text)
        assert theirs.tokenize(text.encode(), add_bos=False) == ids and theirs.detokenize(ids) == text.encode()
    ids, count = ids[:9], tokenizer.n_vocab
    theirs.eval(ids)
    found, expected = torch.tensor(theirs.scores[: len(ids)]), model(torch.tensor([ids]))[0, :, :count]
    if "gpt2" in network:
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-3)
    else:
        assert_close(found, expected)
    theirs.reset()
    written = theirs.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0)
    for _ in range(12):
        best = model(torch.tensor([ids]))[0, -1, :count].argmax().item()
        assert next(written) == best
        ids = [*ids, best]


def test_of_a_hugging_face_folder(folder):
    """Such as GPT-2's, the same file as of a run."""
    make(folder, "gpt2")
    export("runs/x", "out")
    for source, name in (("runs/x", "one.gguf"), ("out", "two.gguf")):
        export(source, name)
    assert (folder / "one.gguf").read_bytes() == (folder / "two.gguf").read_bytes()


def test_mistakes(folder):
    """Nothing is written."""
    for options, tokenizer, words in (
        (NANOCHAT, make_tokenizer("bytes"), "^mlp=relu2, embed_norm=True cannot be written as GGUF: .* --mlp swiglu"),
        (RECIPE, make_tokenizer("bytes+eot"), "value_residual=True, key_offset=True, .* cannot be written as GGUF"),
        ({}, make_tokenizer("char", [TEXT]), r"tokenizer char cannot be written as GGUF: .* train with .*char\+eot"),
    ):
        make_run(folder / f"runs/{tokenizer.name}", tokenizer, **options)
        with pytest.raises(UserError, match=words):
            export(f"runs/{tokenizer.name}", "new/model.gguf")
        assert not (folder / "new").exists()
    (folder / "model.gguf").touch()
    with pytest.raises(UserError, match=r"model.gguf exists; name a new file"):
        export("runs/bytes", "model.gguf")
