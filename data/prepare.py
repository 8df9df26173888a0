"""Prepare a corpus by hand: python -m data.prepare text --input FILE_OR_FOLDER --tokenizer bpe:512"""

import sys
from pathlib import Path
from typing import Literal

import tyro

from data.corpus import prepare


def main(name: Literal["shakespeare", "text"], /, *, input: Path | None = None, tokenizer: str = "bpe:512"):
    """Tokenize a corpus for train.py, and print its sizes.

    Args:
        name: The corpus: tiny Shakespeare, or a text of yours.
        input: Text file or folder of text files; for shakespeare, a local copy of the file.
        tokenizer: bytes, char, bpe:N, gpt2 or gpt2:RANK_FILE.
    """
    corpus = prepare(name, tokenizer, input)
    print(f"text       {corpus.source}, {corpus.train.text_bytes + corpus.val.text_bytes:,} bytes")
    print(f"tokenizer  {corpus.tokenizer.name}, vocabulary of {corpus.tokenizer.n_vocab:,}")
    for label, part in (("train", corpus.train), ("val", corpus.val)):
        print(f"{label:10} {len(part):,} tokens, {part.bytes_per_token:.2f} bytes per token")
    print(f"folder     {corpus.folder}")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
