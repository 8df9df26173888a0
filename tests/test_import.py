"""hf/architectures.py and data/hub_tokenizer.py: models of others, made by the package transformers, read and used."""

import json
import math

import pytest
import torch
from helpers import contents, in_process, losses, make_gpt2_small
from test_weights import TEXT, assert_close, gpt2, loud, make_run

from data.build import Options
from data.chat import encode_turns, with_turns
from data.corpus import prepare
from data.tokenizer import end_of_text, make_tokenizer, to_state
from errors import UserError
from export import export
from generation.text import encode_prompt_text
from hf.architectures import parameters_of, read_config
from hf.tokenizer_json import tokenizer_json
from sample import generate
from weights import load, network_options, read

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SIZES = dict(
    vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=32, bos_token_id=0, eos_token_id=0, pad_token_id=None,
)  # fmt: skip
OTHERS = {
    "llama": dict(intermediate_size=192, rms_norm_eps=1e-2, rope_parameters=dict(rope_type="default", rope_theta=50.0)),
    "arcee": dict(intermediate_size=256, tie_word_embeddings=True),
    "nanochat": dict(intermediate_size=256, rms_norm_eps=1e-2, final_logit_softcapping=2.0),
}
SMOLLM2 = dict(  # config.json of SmolLM2-135M
    model_type="llama", architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=0,
    eos_token_id=0, hidden_act="silu", hidden_size=576, intermediate_size=1536, max_position_embeddings=8192,
    mlp_bias=False, num_attention_heads=9, num_hidden_layers=30, num_key_value_heads=3, pretraining_tp=1,
    rms_norm_eps=1e-05, rope_interleaved=False, rope_scaling=None, rope_theta=100000, tie_word_embeddings=True,
    torch_dtype="bfloat16", vocab_size=49152,
)  # fmt: skip


def save_tokenizer(folder, end="<|endoftext|>"):
    """A byte-level BPE like SmolLM2's: digits apart, and the end of text has the first id."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    steps = [tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = dict(vocab_size=290, special_tokens=[end], initial_alphabet=alphabet)
    trainer = tokenizers.trainers.BpeTrainer(**options)
    tokenizer.train_from_iterator([TEXT * 9], trainer)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
    theirs.save_pretrained(folder)
    return theirs


def save_model(folder, kind, **changes):
    config = transformers.AutoConfig.for_model(kind, **SIZES | OTHERS[kind] | changes)
    model = loud(transformers.AutoModelForCausalLM.from_config(config))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", OTHERS)
def test_logits_and_text_of_others(folder, kind):
    theirs, their_tokenizer = save_model(folder / "theirs", kind), save_tokenizer(folder / "theirs")
    ours, tokenizer, _ = load("theirs", "cpu")
    tokens = torch.randint(tokenizer.n_vocab, (2, 32))
    assert_close(ours(tokens), theirs(tokens).logits)
    for text in (TEXT, TEXT[::-1], "<|endoftext|> is text"):
        ids = tokenizer.encode_ordinary(text)
        assert tokenizer.decode(ids) == text and 0 not in ids
        assert text is not TEXT or ids == their_tokenizer.encode(text, add_special_tokens=False)
    prompt = "It's naïve"
    inputs = their_tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    theirs.generation_config.suppress_tokens = list(range(tokenizer.n_vocab, SIZES["vocab_size"]))  # the padding
    text = theirs.generate(**inputs, max_new_tokens=15, do_sample=False)
    expected = their_tokenizer.decode(text[0], skip_special_tokens=True)
    assert prompt + "".join(generate(ours, tokenizer, prompt, max_tokens=15, temperature=0)) == expected


@pytest.mark.parametrize("rope", ["rope_theta", "rope_parameters"])
def test_shapes_of_smollm2(rope):
    theirs = dict(SMOLLM2)
    if rope == "rope_parameters":  # as Transformers 5 writes them
        theirs[rope] = dict(rope_type="default", rope_theta=theirs.pop("rope_theta"))
    config = read_config(theirs, "smollm2")
    assert config.rope_theta == 100000 and config.norm_eps == 1e-5
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMOLLM2))
    count = sum(math.prod(shape) for _, shape, _ in parameters_of(config))
    assert count == sum(parameter.numel() for parameter in model.parameters())


def test_training_from_others_and_exporting(folder, capsys):
    """What is exported reads the same in Transformers."""
    save_model(folder / "theirs", "llama", tie_word_embeddings=True)
    their_tokenizer = save_tokenizer(folder / "theirs", "</s>")
    options = dict(data="text", input="corpus.txt", device="cpu", steps=2, eval_every=1, batch_size=4, log_every=1)
    (folder / "corpus.txt").write_text("what has taken the sea. " * 300)
    result = in_process(capsys, **options, init_from="theirs", name="tuned")
    assert result.returncode == 0, result.stderr
    assert len(losses(folder, "tuned")) == 2
    export("runs/tuned", "out")
    ours, tokenizer, _ = load("out", "cpu")
    assert read("runs/tuned").config.rope_theta == 50 and ours.config.norm_eps == 1e-2
    theirs = transformers.AutoModelForCausalLM.from_pretrained("out").eval()
    tokens = torch.randint(tokenizer.n_vocab, (2, 32))
    assert_close(theirs(tokens).logits, ours(tokens)[..., : tokenizer.n_vocab])
    text = "It's 1,234\n"
    again = transformers.AutoTokenizer.from_pretrained("out")
    assert len(again) == tokenizer.n_vocab and again.eos_token_id == end_of_text(tokenizer) == 0
    assert again.encode(text) == tokenizer.encode_ordinary(text) == their_tokenizer.encode(text)
    with pytest.raises(UserError, match="tokenizer hub cannot be written as GGUF"):
        export("runs/tuned", "out.gguf")


def save_gpt2(folder, form):
    """A folder of GPT-2 with other tokens or files; returns its tokenizer in Transformers."""
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(make_tokenizer("gpt2"))))
    if form == "blank before the text":
        theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=theirs, eos_token="<|endoftext|>")
    if form == "padding":
        theirs.add_special_tokens(dict(pad_token="[PAD]"))
    elif form == "other tokens":
        theirs.add_special_tokens(dict(additional_special_tokens=["<|im_start|>"]))
        theirs.add_tokens(["covidnineteen", "[MASK]"])
    gpt2(folder, vocab_size=len(theirs))
    theirs.save_pretrained(folder)
    files = {}
    if "vocab.json" in form:
        first = ["[PAD]"] * ("padding" in form)
        texts = [*first, *sorted(theirs.get_vocab(), key=theirs.get_vocab().get)]
        files["vocab"] = {text: index for index, text in enumerate(texts)}
        files["tokenizer_config"] = dict(pad_token=dict(content="[PAD]"))
    if "added_tokens.json" in form:
        files["added_tokens"] = dict(covidnineteen=257)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    if "vocab.json" in form or form == "no files":
        (folder / "tokenizer.json").unlink()
    return theirs


FORMS = {  # and the name of our tokenizer
    "the same": "gpt2", "padding": "gpt2", "vocab.json": "gpt2", "no files": "gpt2", "blank before the text": "hub",
    "other tokens": "hub", "vocab.json and added_tokens.json": None, "added_tokens.json": None,
    "vocab.json with padding first": None,
}  # fmt: skip


@pytest.mark.parametrize("form, name", FORMS.items(), ids=FORMS)
def test_a_folder_like_gpt2_has_one_tokenizer(folder, data_root, monkeypatch, capsys, form, name):
    """For its weights and for a corpus; the tokens are those of Transformers, or the folder is refused."""
    make_gpt2_small(monkeypatch)
    theirs = save_gpt2(folder / "theirs", form)
    if name is None:
        for function in (load, network_options, lambda name: make_tokenizer(f"run:{name}")):
            with pytest.raises(UserError, match=r"theirs.*tokenizer\.json"):
                function("theirs")
        return
    _, tokenizer, _ = load("theirs", "cpu")
    spec = network_options("theirs")["tokenizer"]
    assert to_state(tokenizer) == to_state(make_tokenizer(spec)) == to_state(make_tokenizer("run:theirs"))
    assert tokenizer.name == name and end_of_text(tokenizer) == 256
    for text in ("covidnineteen is [MASK] bad", TEXT):
        assert encode_prompt_text(tokenizer, text) == theirs(text)["input_ids"]
    found = prepare("text", "run:theirs", "corpus.txt", Options(val_share=0.3))
    options = dict(data="text", input="corpus.txt", device="cpu", steps=1, batch_size=4, init_from="theirs")
    assert in_process(capsys, **options).returncode == 0
    assert contents("runs/run/checkpoint.pt")["tokens_sha256"] == found.sha256
    if name == "hub":
        with pytest.raises(UserError, match="tokenizer hub cannot be written as GGUF"):
            export("theirs", "out.gguf")  # where added tokens would be missing


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(model_type="qwen3"), "smollm2 holds a qwen3 model; only gpt2, llama, .* can be read"),
        (dict(rope_scaling=dict(type="linear", factor=2.0)), "rope_type=linear is not supported, only default"),
        (dict(rope_parameters=dict(rope_type="llama3", rope_theta=5e5)), "rope_type=llama3 is not supported"),
        (dict(rope_parameters=dict(rope_theta=5e5, partial_rotary_factor=0.5)), "partial_rotary_factor=0.5 is not"),
        (dict(head_dim=128), "head_dim=128 is not supported, only None or 64"),
        (dict(intermediate_size=2048), "intermediate_size=2048 is not supported, only 1536"),
        (dict(attention_bias=True), "attention_bias=True is not supported"),
        (dict(hidden_act="relu"), "hidden_act=relu is not supported, only silu"),
        (dict(hidden_size=570), "n_embd=570 / n_head=9 is the head dim"),
        (dict(rms_norm_eps=None), "norm_eps=None must be float"),
        (dict(num_attention_heads="9"), "n_head='9' must be int"),
    ],
    ids=str,
)
def test_what_the_network_lacks_is_named(change, words):
    with pytest.raises(UserError, match=words):
        read_config(SMOLLM2 | change, "smollm2")


@pytest.mark.parametrize("form", ["an export", "special tokens", "ordinary tokens"])
def test_no_text_has_the_token_that_ends_a_turn(folder, form):
    """Whatever tool saved the folder. A line of bytes may be a whole word of the vocabulary, without merges."""
    tokenizer = with_turns(make_tokenizer("bytes"))
    make_run(folder / "runs/x", tokenizer)
    export("runs/x", "out")
    theirs = transformers.AutoTokenizer.from_pretrained("out")
    if form != "an export":
        plain = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(make_tokenizer("bytes+eot"))))
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|endoftext|>")
        theirs.add_tokens([*tokenizer._special_tokens][1:], special_tokens=form == "special tokens")
    theirs.save_pretrained("again")
    found = make_tokenizer("run:again")
    assert found.name == "hub" and found._special_tokens == tokenizer._special_tokens
    for text in ("hi\n<|end|>\n", "<|end|>", "a <|user|><|end|> b<|endoftext|>", "the sea"):
        ids = encode_turns(found, [("<|user|>", text)])[0][1:-1]
        assert not {*ids} & {*found._special_tokens.values()} and found.decode(ids) == text


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(decoder=None), "tokenizer.json has the decoder None, but only ByteLevel can be read"),
        (None, "unknown tokenizer"),
    ],
)
def test_tokenizers_that_cannot_be_read(folder, change, words):
    save_model(folder / "theirs", "llama")
    save_tokenizer(folder / "theirs")
    file = folder / "theirs/tokenizer.json"
    if change:
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    else:
        file.unlink()
    with pytest.raises(UserError, match=words):
        load("theirs", "cpu")
