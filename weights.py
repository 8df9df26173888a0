"""Reads trained models: checkpoints of runs, and folders of Hugging Face, as export.py writes or of others."""

import sys
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import torch

from data.files import GPT2_SIZES, RUNS, find_run
from data.tokenizer import is_untrained
from device import note_large, resolve_device, resolve_dtype
from errors import UserError, require
from hf.read import Pretrained, download_files, read_folder, restore
from model import GPT, RMSNorm
from threads import cpu_threads

FORMAT = 2  # of checkpoints; 1 had each block's embedding skip in the block
NOT_OF_WEIGHTS = ("dropout", "attention", "mask_documents", "end_of_text")  # options that weights do not determine


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
        files = ["config.json", "model.safetensors"] if weights else ["config.json"]
        return read_folder(download_files(f"openai-community/{name}", files), weights)
    path = find_run(name)
    if (path.suffix == ".safetensors" and path.is_file()) or any(path.glob("model*.safetensors")):
        return read_folder(path, weights)
    found = [file for file in (path, path / "best.pt") if file.is_file()] + checkpoints(path)
    rule = f"name a run with a checkpoint, a model's folder, or {', '.join(GPT2_SIZES)}"
    require(found, f"there is no checkpoint and no model.safetensors in {path}; {rule}")
    contents = load_first(found, weights)
    config, tokenizer = restore(contents["path"], contents.get("model_config"), contents.get("tokenizer"))
    return Pretrained(contents["path"], config, contents["model"] if weights else {}, tokenizer, contents)


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
    if device == "cpu":
        cpu_threads.start()
    found = read(run)
    require_tokenizer(found)
    model = GPT(replace(found.config, attention="auto"), seed=None)  # this machine may have other kernels
    model.load_state_dict(found.weights)
    step = found.contents.get("step")
    model.source = str(found.path) if step is None else f"{found.path}, step {step},"
    if resolve_dtype(dtype, device) == torch.bfloat16:
        to_bfloat16(model)
    return model.to(device).eval(), found.tokenizer, found.contents


def to_bfloat16(model):
    """Change the weights of a GPT to bfloat16, which halves the time to read them; returns the model.

    RMSNorm computes in float32 and keeps float32 weights. The rotary angles, which are buffers, also stay in float32.
    """
    for module in model.modules():
        if not isinstance(module, RMSNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.bfloat16()
    return model


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


def checkpoints(folder):
    """Paths of the folder's checkpoints with optimizer state, newest first."""
    folder = Path(folder)
    steps = [path.stem.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*.pt")]
    older = sorted((step for step in steps if step.isdecimal()), key=int, reverse=True)
    newest = [path] if (path := folder / "checkpoint.pt").exists() else []
    return newest + [folder / f"checkpoint-{step}.pt" for step in older]


def load_first(paths, weights=True):
    """Contents of the first checkpoint that is not damaged, with a warning for those before it; {} without paths."""
    for path in paths[:-1]:
        try:
            return load_checkpoint(path, weights)
        except UserError as error:
            print(f"warning: {error}", file=sys.stderr)
    return load_checkpoint(paths[-1], weights) if paths else {}


def load_checkpoint(path, weights=True):
    """The contents of a checkpoint, mapped into memory, and its "path". Nothing in it is executed (weights_only).

    Without `weights` the tensors are not read, so damage to them is not noticed.

    Raises:
        UserError: it is damaged, or not a checkpoint of this project. OSError: it cannot be read.
    """
    if weights:
        note_large(path)
    try:
        with zipfile.ZipFile(path) as file:  # torch.load does not check the checksums
            broken = weights and file.testzip()
        if broken:
            raise UserError(f"wrong checksum of {broken}")
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, MemoryError):  # the file may be good
        raise
    except Exception as error:  # zipfile and torch.load raise a dozen types for a damaged file
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        raise UserError(f"checkpoint {path} cannot be read ({reason}); use another one") from error
    found = contents.get("format") if isinstance(contents, dict) else None
    require(found != 1, f"checkpoint {path} has the older format 1; to read it, git checkout ea11357")
    require(found == FORMAT, f"checkpoint {path} is not of this project's format {FORMAT}; use another one")
    return contents | {"path": path}
