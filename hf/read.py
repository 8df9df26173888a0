"""Reads Hugging Face folders: config.json, model.safetensors and the tokenizer's files.

Those of hf/export.py also have kestrel.json, with the network and the tokenizer in this repository's own terms.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from data.files import optional, read_json
from data.hub import one_sentence
from data.tokenizer import STORED, from_state, tokenizer_of
from device import note_large
from errors import UserError, require
from hf.architectures import parameters_of, read_config, switch_layout
from model import GPTConfig

BUFFERS = (".attn.bias", ".attn.masked_bias", ".inv_freq")  # of masks and rotary positions, in older files


class Pretrained(NamedTuple):
    """A trained network, on the CPU."""

    path: Path
    config: GPTConfig
    weights: dict  # a GPT's state_dict
    tokenizer: object  # None if it is unknown
    contents: dict  # of the checkpoint, or only "path"


def download_files(repository, names):
    """Folder in the hub's own cache with these files of a model."""
    with one_sentence(f"download {repository}") as hub:
        try:
            paths = [hub.hf_hub_download(repository, name, local_files_only=True) for name in names]
        except hub.errors.LocalEntryNotFoundError:
            hub.HfApi().model_info(repository, timeout=30)  # fails at once; a download tries for half a minute
            paths = [hub.hf_hub_download(repository, name) for name in names]
    return Path(paths[0]).parent


def read_folder(path, weights=True):
    """The Pretrained of a Hugging Face folder or its .safetensors file; without `weights` they are left out."""
    folder, file = (path.parent, path) if path.is_file() else (path, path / "model.safetensors")
    if (our_file := folder / STORED).exists():
        ours = read_json(our_file)
        config, tokenizer = restore(our_file, ours.get("network"), ours.get("tokenizer"))
    else:
        config = read_config(read_json(folder / "config.json"), folder)
        tokenizer = tokenizer_of(folder)
        count = tokenizer.n_vocab if tokenizer else 0
        rule = f"which is more than vocab_size={config.vocab_size} of config.json; get both from one model"
        require(count <= config.vocab_size, f"{folder} has {count} tokens, {rule}")
    state = _read_weights(file, config) if weights else {}
    return Pretrained(file, config, state, tokenizer, {"path": file})


def restore(path, network, tokenizer):
    """(GPTConfig, tokenizer) of stored dicts."""
    try:
        return GPTConfig(**network), from_state(tokenizer)
    except (TypeError, KeyError, ValueError) as error:
        another = "is damaged or from another version of this repository"
        raise UserError(f"{path} {another} ({error}); get it again or use that version") from None


def _read_weights(file, config):
    """The state_dict of a GPT from a .safetensors file, in float32."""
    safetensors = optional("safetensors.torch", "reading model.safetensors")
    theirs = {}
    for part in [file] if file.exists() else sorted(file.parent.glob("model-*.safetensors")):
        note_large(part)
        try:
            theirs |= safetensors.load_file(part)
        except Exception as error:  # the package's own exception
            raise UserError(f"cannot read {part} ({error}); get it again") from None
    if "wte.weight" in theirs:  # OpenAI's own file leaves the prefix out
        theirs = {f"transformer.{name}": value for name, value in theirs.items()}
    weights, known = {}, set()
    for name, shape, keys in parameters_of(config):
        known |= {*keys}
        for key in keys:
            require(key in theirs, f"{file} lacks {key}, which config.json asks for")
        value = torch.cat([switch_layout(key, theirs[key], config) for key in keys]).float()
        found = f"{' + '.join(keys)} is {list(value.shape)}"
        require(value.shape == shape, f"{file}: {found}, but config.json makes it {list(shape)}")
        weights[name] = value.contiguous()
    others = [key for key in theirs.keys() - known if key.startswith(("model.", "transformer."))]
    other = min((key for key in others if not key.endswith(BUFFERS)), default=None)
    ours = (file.parent / STORED).exists()  # exports have biases of 0 where the network has none
    require(ours or not other, f"{file} has {other}, for which our network has no place; take another model")
    return {"head.weight": weights["embed.weight"], **weights} if config.tie_head else weights
