"""Write a trained model for other programs.

python export.py RUN FOLDER        a Hugging Face folder
python export.py RUN FILE.gguf     a GGUF file, for llama.cpp and Ollama

hf/architectures.py has the architectures and the options that a network must have.
"""

from errors import command, quote, require, start_command

if __name__ == "__main__":
    start_command("PyTorch")

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from flags import parse_flags
from hf.export import write_folder, write_gguf
from weights import read, require_tokenizer


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """python export.py RUN FOLDER_OR_FILE.gguf [--dtype float16]"""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Named as for sample.py. A Hugging Face folder or gpt2 (OpenAI's) can only be written as GGUF."""
    path: Annotated[Path, tyro.conf.Positional]
    """Folder to write, or a file that ends in .gguf; it must not exist."""
    dtype: Literal["float32", "float16"] = "float32"
    """Of the weights; float16 halves the size."""


def export(name, path, dtype="float32"):
    """Write a model as a Hugging Face folder or, if the path ends in .gguf, as a GGUF file, whole or not at all.

    Args:
        name: as of weights.read(). path: one that does not exist. dtype: of the weights, float32 or float16.

    Raises:
        UserError: the path exists, or those who read the file have no such network or tokenizer, or it cannot be
            written; and as in read().
    """
    path = Path(path)
    is_file = path.suffix == ".gguf"
    of_folder = is_file or not path.suffix[1:].isalpha()
    require(of_folder, f"{path} ends like a file; name a file that ends in .gguf, or a folder")
    require(not path.exists(), f"{path} exists; name a new {'file' if is_file else 'folder'}")
    found = read(name)
    require_tokenizer(found)
    if is_file:
        return write_gguf(found, path, dtype)
    require("step" in found.contents, f"{found.path} is a Hugging Face model already; only .gguf can be written")
    write_folder(found, path, dtype)


def main(argv):
    config = parse_flags(ExportConfig, argv)
    export(config.run, config.path, config.dtype)
    trust = ", trust_remote_code=True" if (config.path / "modeling_kestrel.py").exists() else ""
    use = f"load it with AutoModelForCausalLM.from_pretrained({str(config.path)!r}{trust})"
    if config.path.suffix == ".gguf":
        use = f"continue a text: llama-completion -m {quote(config.path)} -p TEXT -n 100"
    print(f"wrote {config.path}; {use}")


if __name__ == "__main__":
    with command():
        main(sys.argv[1:])
