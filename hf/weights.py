"""Reads trained models: of runs, of the folders that hf/export.py writes, and of others, such as GPT-2 and Llama.

A Hugging Face folder has config.json, model.safetensors and the tokenizer's files. Those of export.py also have
kestrel.json, with the network and the tokenizer in this repository's own terms.
"""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch

from data.chat import has_turns, with_turns
from data.files import GPT2_SIZES, RUNS, find_run, optional, read_json
from data.hub import download_files
from data.tokenizer import STORED, from_state, is_untrained, to_state, tokenizer_of
from errors import UserError, require
from generation.generate import to_bfloat16
from hf.architectures import parameters_of, read_config, switch_layout
from model import GPTConfig
from training.checkpoint import NOT_OF_WEIGHTS, checkpoints, copy_weights, empty_model, load_first
from training.device import resolve_device, resolve_dtype

BUFFERS = (".attn.bias", ".attn.masked_bias", ".inv_freq")  # of masks and rotary positions, in older files


class Pretrained(NamedTuple):
    """A trained network, on the CPU."""

    path: Path
    config: GPTConfig
    weights: dict  # a GPT's state_dict
    tokenizer: object  # None if it is unknown
    contents: dict  # of the checkpoint, or only "path"


def read(name, weights=True):
    """Read a Pretrained; without `weights` they are left out.

    Args:
        name: gpt2, gpt2-medium, gpt2-large or gpt2-xl, which are OpenAI's; a run, as its folder or NAME, whose best.pt
            is preferred, or a checkpoint file; a Hugging Face folder or its .safetensors file; "" for the newest run.

    Raises:
        UserError: there is no model, it is damaged, or its network is not supported.
        OSError: it cannot be read.
    """
    if name in GPT2_SIZES:
        for folder in (f"{RUNS}/{name}", f"./{name}"):
            if weights and Path(folder).is_dir():
                print(f"note: {name} is OpenAI's model; yours is {folder}", file=sys.stderr)
        path = download_files(f"openai-community/{name}", ["config.json", "model.safetensors"][: 1 + weights])
        return _read_hugging_face(path, weights)
    path = find_run(name)
    if (path.suffix == ".safetensors" and path.is_file()) or any(path.glob("model*.safetensors")):
        return _read_hugging_face(path, weights)
    found = [file for file in (path, path / "best.pt") if file.is_file()] + checkpoints(path)
    missing = "has no checkpoint and no model.safetensors" if path.is_dir() else "does not exist"
    require(found, f"{path} {missing}; name a run with a checkpoint, a model's folder, or {', '.join(GPT2_SIZES)}")
    contents = load_first(found, weights)
    config, tokenizer = _restore(contents["path"], contents.get("model_config"), contents.get("tokenizer"))
    return Pretrained(contents["path"], config, contents["model"] if weights else {}, tokenizer, contents)


def _restore(path, network, tokenizer):
    """(GPTConfig, tokenizer) of stored dicts."""
    try:
        return GPTConfig(**network), from_state(tokenizer)
    except (TypeError, KeyError, ValueError) as error:
        another = "is damaged or from another version of this repository"
        raise UserError(f"{path} {another} ({error}); get it again or use that version") from None


def load(run="", device="auto", dtype="auto"):
    """(GPT for generation, tokenizer, contents of the checkpoint or, for a Hugging Face model, {"path"}).

    The GPT's attribute `source` is the path and, of a checkpoint, the step.

    Args:
        run: as the name in read(). device: auto, cpu, cuda, cuda:N or mps.
        dtype: of the weights, float32 or bfloat16; auto takes bfloat16 on a GPU that has it.

    Raises:
        UserError: the device does not exist; and as in read().
    """
    device = resolve_device(device)
    found = read(run)
    require_tokenizer(found)
    model = empty_model(replace(found.config, attention="auto"))  # this machine may have other kernels
    model.load_state_dict(found.weights)
    model.source = str(found.path) + (f", step {step}," if (step := found.contents.get("step")) is not None else "")
    if resolve_dtype(dtype, device) == torch.bfloat16:
        to_bfloat16(model)
    return model.to(device).eval(), found.tokenizer, found.contents


def require_tokenizer(found):
    """The tokenizer of a Pretrained; UserError if it is unknown."""
    rule = "its tokenizer.json is missing or lacks added tokens; save it with Transformers' AutoTokenizer"
    require(found.tokenizer, f"{found.path.parent} has an unknown tokenizer: {rule}")
    return found.tokenizer


def network_options(name):
    """The options (network and tokenizer) that --init_from sets."""
    found = read(name, weights=False)
    tokenizer = require_tokenizer(found)
    options = {option: value for option, value in asdict(found.config).items() if option not in NOT_OF_WEIGHTS}
    return options | {"tokenizer": tokenizer.name if is_untrained(tokenizer) else f"run:{name}"}


def load_pretrained(model, name, tokenizer):
    """Copy the weights that --init_from names into a GPT, whose context may be shorter than theirs.

    If only `tokenizer` has the tokens of turns, their rows begin as the mean of the others, and the tables may grow.

    Raises:
        UserError: the network or the tokenizer differs; and as for read().
    """
    found, chat = read(name), has_turns(tokenizer)
    theirs = require_tokenizer(found)
    same = to_state(with_turns(theirs) if chat else theirs) == to_state(tokenizer)
    require(same, f"the corpus has another tokenizer ({tokenizer.name}) than {name}; give --tokenizer run:{name}")
    for option, value in asdict(found.config).items():
        asked = getattr(model.config, option)
        fits = asked == value or option in NOT_OF_WEIGHTS or (option == "block_size" and asked < value)
        fits |= option == "vocab_size" and chat and asked > value
        require(fits, f"{option}={asked} does not fit the weights of {name}, which have {value}; leave {option} out")
    weights = dict(found.weights)
    if model.config.position == "learned":
        weights["embed_position.weight"] = weights["embed_position.weight"][: model.config.block_size]
    for key in ("embed.weight", "head.weight") if tokenizer.n_vocab > theirs.n_vocab else ():
        old, new = weights[key][: theirs.n_vocab], tokenizer.n_vocab - theirs.n_vocab
        weights[key] = torch.cat([old, old.mean(0).expand(new, -1), weights[key][tokenizer.n_vocab :]])
    copy_weights(model, weights)


def _read_hugging_face(path, weights):
    folder, file = (path.parent, path) if path.is_file() else (path, path / "model.safetensors")
    if (our_file := folder / STORED).exists():
        ours = read_json(our_file)
        config, tokenizer = _restore(our_file, ours.get("network"), ours.get("tokenizer"))
    else:
        config = read_config(read_json(folder / "config.json"), folder)
        tokenizer = tokenizer_of(folder)
        count = tokenizer.n_vocab if tokenizer else 0
        rule = f"which is more than vocab_size={config.vocab_size} of config.json; get both from one model"
        require(count <= config.vocab_size, f"{folder} has {count} tokens, {rule}")
    return Pretrained(file, config, _read_weights(file, config) if weights else {}, tokenizer, {"path": file})


def _read_weights(file, config):
    """The state_dict of a GPT from a .safetensors file, in float32."""
    safetensors = optional("safetensors.torch", "reading model.safetensors")
    theirs = {}
    for part in [file] if file.exists() else sorted(file.parent.glob("model-*.safetensors")):
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
