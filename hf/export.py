"""Writes trained models as Hugging Face folders.

    python -m hf.export RUN FOLDER     write a run's best model

The classic network is written as GPT-2. The modern one (RMSNorm, rotary positions, SwiGLU or squared ReLU) is written
as Qwen3 if it has QK-norm, and may then have a window, else as Llama.
"""

from errors import UNFINISHED, catch_ctrl_c, command, require

if __name__ == "__main__":
    catch_ctrl_c()

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import tyro

from data import end_of_text, to_state
from data.files import optional, writing
from data.tokenizer import END_OF_TEXT, STORED
from generation import Sampling
from hf.tokenizer_json import tokenizer_json
from hf.weights import GELUS, LAYERNORM_EPSILON, is_transposed, parameters_of, read
from model import RMSNORM_EPSILON
from training.checkpoint import empty_model

# Options that a network must have to be exported, by the name of the architecture in Transformers.
WRITABLE = {
    "gpt2": dict(norm=["layernorm"], mlp=["gelu", "gelu_tanh"], qk_norm=[False], window=[None]),
    "llama": dict(norm=["rmsnorm"], mlp=["swiglu", "relu2"], bias=[False], window=[None]),
    "qwen3": dict(norm=["rmsnorm"], mlp=["swiglu", "relu2"], bias=[False]),
}


def _card(found, config, note):
    """README.md for a Pretrained of a run; config: GPTConfig of the exported network."""
    parameters = sum(parameter.numel() for parameter in empty_model(config, "meta").parameters())
    best = found.contents.get("best") if found.path.name == "best.pt" else None  # of a checkpoint: the best so far
    lines = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n# " + found.path.parent.name,
        f"Trained with Kestrel, {found.contents['step']:,} steps. {parameters:,} parameters, {config.n_layer} layers, "
        f"width {config.n_embd}, context {config.block_size}, tokenizer {found.tokenizer.name}.",
        f"Validation loss: {best:.4f} nats per token." if best is not None else "",
        note,
    ]
    return "\n\n".join(filter(None, lines)) + "\n"


def _their_weights(weights, config):
    """The tensors of a Hugging Face file, for the state_dict of a GPT. Missing biases are 0, missing weights 1."""
    theirs = {}
    for name, shape, key in parameters_of(replace(config, bias=config.position == "learned", norm_weight=True)):
        absent = torch.full(shape, float(name.endswith("weight")))
        value = weights.get(name, absent)[: shape[0]]  # without the padding of the vocabulary
        if "[qkv]" in key:
            heads = (config.n_head, config.kv_heads, config.kv_heads)
            for part, rows in zip("qkv", value.split([count * config.head_dim for count in heads]), strict=True):
                theirs[key.replace("[qkv]", part)] = rows.clone()
            if config.qk_norm:  # Qwen3's norms of queries and keys have weights, ours do not
                for part in "qk":
                    theirs[key.replace("[qkv]_proj", f"{part}_norm")] = torch.ones(config.head_dim)
        else:
            theirs[key] = (value.T if is_transposed(key) else value).clone(memory_format=torch.contiguous_format)
        if config.mlp == "relu2" and ".up_proj." in key:  # relu(x)^2 = relu(x) x is a gated MLP with equal matrices
            theirs[key.replace("up_proj", "gate_proj")] = value.clone()
    return theirs


def _their_config(config, end):
    """config.json for a network; UserError if Hugging Face's Transformers has no such network."""
    kind = "gpt2" if config.position == "learned" else "qwen3" if config.qk_norm else "llama"
    wanted = WRITABLE[kind] | dict(logit_softcap=[None], mask_documents=[False])
    wanted |= dict(embed_skip=[False], value_residual=[False])
    wanted |= {"n_kv_head": [None, config.n_head]} if kind == "gpt2" else {}
    for name, values in wanted.items():
        found, only = getattr(config, name), " or ".join(map(str, values))
        rule = f"this network is written as {kind}, which can only have {only}; train one with that"
        require(found in values, f"{name}={found} cannot be exported: {rule}")
    rule = "the cache of Transformers needs a window of 2 or more; train a network with that"
    require(config.window != 1, f"window=1 cannot be exported: {rule}")
    common = dict(vocab_size=config.vocab_size, tie_word_embeddings=config.tie_head, bos_token_id=end,
                  eos_token_id=end, dtype="float32")  # fmt: skip
    if kind == "gpt2":
        gelu = {ours: theirs for theirs, ours in GELUS.items()}[config.mlp]
        return common | dict(
            model_type="gpt2", architectures=["GPT2LMHeadModel"], n_positions=config.block_size, n_embd=config.n_embd,
            n_layer=config.n_layer, n_head=config.n_head, activation_function=gelu,
            layer_norm_epsilon=LAYERNORM_EPSILON, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
    windows = {}
    if config.window is not None:
        blocks = empty_model(config, "meta").blocks
        layers = ["sliding_attention" if block.attention.window else "full_attention" for block in blocks]
        windows = dict(use_sliding_window=True, sliding_window=config.window, layer_types=layers)
    return common | windows | dict(
        model_type=kind, architectures=[f"{kind.capitalize()}ForCausalLM"], hidden_size=config.n_embd,
        intermediate_size=config.mlp_width, num_hidden_layers=config.n_layer, num_attention_heads=config.n_head,
        num_key_value_heads=config.kv_heads, head_dim=config.head_dim, max_position_embeddings=config.block_size,
        hidden_act={"swiglu": "silu", "relu2": "relu"}[config.mlp], rms_norm_eps=RMSNORM_EPSILON, rope_theta=10000.0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, attention_bias=False, attention_dropout=0.0,
    )  # fmt: skip


def export(name, folder):
    """Write a model as a Hugging Face folder, whole or not at all. Prints a warning if only Transformers can use it.

    Args:
        name: as of read(). folder: a path that does not exist.

    Raises:
        UserError: the folder exists, or Hugging Face's Transformers has no such network, or the folder cannot be
            written; and as in read().
    """
    folder = Path(folder)
    require(not folder.exists(), f"{folder} exists; name a new folder")
    safetensors = optional("safetensors.torch", "writing model.safetensors")
    found = read(name)
    tokenizer = found.tokenizer
    require("step" in found.contents, f"{found.path} is a Hugging Face model already")
    config, end = replace(found.config, vocab_size=tokenizer.n_vocab), end_of_text(tokenizer)
    settings = dict(temperature=Sampling.temperature, top_k=Sampling.top_k)
    special = {} if end is None else {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    files = {
        "config.json": _their_config(config, end),
        "generation_config.json": dict(do_sample=True, bos_token_id=end, eos_token_id=end, **settings),
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": dict(tokenizer_class="PreTrainedTokenizerFast", model_max_length=config.block_size,
                                      clean_up_tokenization_spaces=False, **special),
        STORED: {"network": asdict(config), "tokenizer": to_state(tokenizer)},
    }  # fmt: skip
    tensors = _their_weights(found.weights, config)
    # Others ignore these fields of config.json: their Llama and Qwen3 have SiLU and full attention.
    lost = ["squared ReLU"] * (config.mlp == "relu2") + ["the window"] * (config.window is not None)
    others = f"llama.cpp, MLX and others ignore {' and '.join(lost)} and write wrong text"
    note = f"For Transformers only: {others}." if lost else ""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    UNFINISHED.add(temporary)
    try:
        with writing(folder):
            temporary.mkdir(parents=True)
            for file, value in files.items():
                (temporary / file).write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
            (temporary / "README.md").write_text(_card(found, config, note), encoding="utf-8", errors="replace")
            safetensors.save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
            (temporary / "model.safetensors").chmod(0o644)  # safetensors makes it private
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if note:
        print(f"warning: {note}", file=sys.stderr)


@dataclass(frozen=True)
class Command:
    """Write a model as a Hugging Face folder, for Transformers and other tools that read its files."""

    run: tyro.conf.Positional[str]
    """Run folder, whose best.pt is preferred, or checkpoint file."""
    folder: tyro.conf.Positional[Path]
    """Folder to write; it must not exist."""


if __name__ == "__main__":
    with command():
        options = tyro.cli(Command)
        export(options.run, options.folder)
        print(f"wrote {options.folder}; load it with AutoModelForCausalLM.from_pretrained({str(options.folder)!r})")
