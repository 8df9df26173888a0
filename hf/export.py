"""Writes trained models for other programs.

    python -m hf.export RUN FOLDER        a Hugging Face folder
    python -m hf.export RUN FILE.gguf     a GGUF file, for llama.cpp and Ollama

hf/architectures.py has the architectures and the options that a network must have.
"""

from errors import UNFINISHED, catch_ctrl_c, command, quote, require

if __name__ == "__main__":
    catch_ctrl_c()

import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro

from data.chat import END, chat_template, has_turns
from data.files import optional, writing
from data.tokenizer import STORED, end_of_text, to_state
from generation import Sampling
from hf.architectures import config_json, their_weights
from hf.gguf import make_writer
from hf.tokenizer_json import tokenizer_json
from hf.weights import read, require_tokenizer
from training.checkpoint import empty_model


def _card(found, config):
    """README.md for a Pretrained of a run; config: GPTConfig of the exported network."""
    parameters = sum(parameter.numel() for parameter in empty_model(config, "meta").parameters())
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


def export(name, path, dtype="float32"):
    """Write a model as a Hugging Face folder or, if the path ends in .gguf, as a GGUF file, whole or not at all.

    Args:
        name: as of read(). path: one that does not exist. dtype: of the weights, float32 or float16.

    Raises:
        UserError: the path exists, or those who read the file have no such network or tokenizer, or it cannot be
            written; and as in read().
    """
    path = Path(path)
    require(not path.exists(), f"{path} exists; name a new {'file' if path.suffix == '.gguf' else 'folder'}")
    found = read(name)
    config = replace(found.config, vocab_size=require_tokenizer(found).n_vocab)
    if has_turns(found.tokenizer):  # no document ends inside a conversation
        config = replace(config, mask_documents=False)
    if path.suffix == ".gguf":
        writer = make_writer(found, config, getattr(torch, dtype))
        with _temporary(path) as temporary:
            writer.write_header_to_file(temporary / "model")
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            (temporary / "model").rename(path)
    else:
        require("step" in found.contents, f"{found.path} is a Hugging Face model already; only .gguf can be written")
        _write_folder(found, config, path, dtype)


def _write_folder(found, config, path, dtype):
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


@dataclass(frozen=True)
class Command:
    """Write a model as a Hugging Face folder, or as a GGUF file for llama.cpp and Ollama."""

    run: tyro.conf.Positional[str]
    """Named as for sample.py. A Hugging Face folder or gpt2 (OpenAI's) can only be written as GGUF."""
    path: tyro.conf.Positional[Path]
    """Folder to write, or a file that ends in .gguf; it must not exist."""
    dtype: Literal["float32", "float16"] = "float32"
    """Of the weights; float16 halves the size."""


if __name__ == "__main__":
    with command():
        options = tyro.cli(Command, prog="python -m hf.export")
        export(options.run, options.path, options.dtype)
        trust = ", trust_remote_code=True" if (options.path / "modeling_kestrel.py").exists() else ""
        use = f"load it with AutoModelForCausalLM.from_pretrained({str(options.path)!r}{trust})"
        if options.path.suffix == ".gguf":
            use = f"continue a text: llama-completion -m {quote(options.path)} -p TEXT -n 100"
        print(f"wrote {options.path}; {use}")
