"""Writes trained models as Hugging Face folders and as GGUF files, whole or not at all."""

import json
import os
import shutil
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

from data.chat import END, chat_template, has_turns
from data.files import optional, writing
from data.tokenizer import STORED, end_of_text, to_state
from errors import UNFINISHED
from generation import Sampling
from hf.architectures import config_json, parameters_of, their_weights
from hf.gguf import make_writer
from hf.tokenizer_json import tokenizer_json


def _card(found, config):
    """README.md for a Pretrained of a run; config: GPTConfig of the exported network."""
    parameters = sum(shape.numel() for _, shape, _ in parameters_of(config))
    best = found.contents.get("best") if found.path.name == "best.pt" else None  # of a checkpoint: the best so far
    loss = "" if best is None else f"\n\nValidation loss: {best:.4f} nats per token."
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n# {found.path.parent.name}\n\n"
        f"Trained with Kestrel, {found.contents['step']:,} steps. {parameters:,} parameters, {config.n_layer} layers, "
        f"width {config.n_embd}, context {config.block_size}, tokenizer {found.tokenizer.name}.{loss}\n"
    )


@contextmanager
def _temporary(path):
    """A folder beside a path, from which its content is moved there when it is whole."""
    folder = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    UNFINISHED.add(folder)
    try:
        with writing(path):
            folder.mkdir(parents=True)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _config_of(found):
    """GPTConfig of a Pretrained as it is exported: without padding of the vocabulary."""
    config = replace(found.config, vocab_size=found.tokenizer.n_vocab)
    # no document ends inside a conversation
    return replace(config, mask_documents=False) if has_turns(found.tokenizer) else config


def write_gguf(found, path, dtype):
    """Write a Pretrained as a GGUF file; UserError if llama.cpp has no such network or tokenizer."""
    writer = make_writer(found, _config_of(found), getattr(torch, dtype))
    with _temporary(path) as temporary:
        writer.write_header_to_file(temporary / "model")
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        (temporary / "model").rename(path)


def write_folder(found, path, dtype):
    """Write a Pretrained of a run as a Hugging Face folder; UserError if Transformers has no such network."""
    config = _config_of(found)
    safetensors = optional("safetensors.torch", "writing model.safetensors")
    tokenizer, end = found.tokenizer, end_of_text(found.tokenizer)
    chat = has_turns(tokenizer)
    ends = [end, tokenizer._special_tokens[END]] if chat else end
    settings = dict(temperature=Sampling.temperature, top_k=Sampling.top_k)
    special = {} if end is None else dict.fromkeys(("bos_token", "eos_token"), tokenizer.decode([end]))
    files = {
        "config.json": config_json(config, end, dtype),
        "generation_config.json": dict(do_sample=True, bos_token_id=end, eos_token_id=ends, **settings),
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": dict(tokenizer_class="PreTrainedTokenizerFast", model_max_length=config.block_size,
                                      clean_up_tokenization_spaces=False, **special),
        STORED: {"network": asdict(config), "tokenizer": to_state(tokenizer)},
    }  # fmt: skip
    tensors = {name: value.to(getattr(torch, dtype)) for name, value in their_weights(found.weights, config).items()}
    with _temporary(path) as temporary:
        for file, value in files.items():
            (temporary / file).write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
        if chat:
            (temporary / "chat_template.jinja").write_text(chat_template(tokenizer), encoding="utf-8")
        if files["config.json"]["model_type"] == "kestrel":
            shutil.copy(Path(__file__).with_name("modeling_kestrel.py"), temporary)
        (temporary / "README.md").write_text(_card(found, config), encoding="utf-8", errors="replace")
        safetensors.save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "model.safetensors").chmod(0o644)  # safetensors makes it private
        temporary.rename(path)


if __name__ == "__main__":
    sys.exit("error: this is no command any more; type python export.py RUN FOLDER")
