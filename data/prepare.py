"""Prepare a corpus by hand: python -m data.prepare fineweb-edu --tokens 1B --tokenizer gpt2

python -m data.prepare chat --input FILE.jsonl --tokenizer gpt2         conversations: see data/chat.py
python -m data.prepare hub:OWNER/NAME --tokenizer gpt2                  parquet files of the hub, of texts or messages
"""

from errors import command, start_command

if __name__ == "__main__":
    start_command()

import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from data.build import Options
from data.corpus import prepare
from data.documents import MESSAGES
from data.hub import HUB
from flags import parse_flags


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(Options):
    """python -m data.prepare CORPUS [--input PATH] [--option value ...]

    Tokenizes a corpus for train.py, and prints its sizes. An interrupted preparation continues where it was.
    """

    corpus: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS")]
    """The corpus: shakespeare, fineweb-edu or openwebtext; with --input, text, chat (conversations) or tokens (of
    nanoGPT, llm.c or modded-nanogpt, used where they are); or hub:OWNER/NAME or hub:OWNER/NAME/FOLDER, a data set of
    the Hugging Face hub, which has texts or, with --text_field messages, conversations."""
    input: Path | None = None
    """File or folder: .txt, .md, .jsonl, .ndjson, each also compressed (.gz, .bz2, .xz or .zst), .parquet; for chat,
    .jsonl, .ndjson or .parquet. For tokens, the folder with train.bin and val.bin, or with *_train_*.bin and
    *_val_*.bin."""
    tokenizer: str = "bpe:512"
    """bytes, char, bpe:N, gpt2, gpt2:RANK_FILE or run:PATH (the tokenizer of a run or model), the same as in train.py.
    bytes+eot and char+eot have an end-of-text token."""
    threads: int | None = None
    """Threads that tokenize; None takes one for each core."""
    force: bool = False
    """Replace a corpus, or an unfinished one, that was prepared with other options or from other files."""


def main(argv):
    began, config = time.perf_counter(), parse_flags(PrepareConfig, argv)
    options = Options(**{field.name: getattr(config, field.name) for field in fields(Options)})
    name, place = config.corpus, config.input
    if name.startswith(HUB):
        name, place = "chat" if options.text_field in MESSAGES else "text", name
    corpus = prepare(name, config.tokenizer, place, options, config.threads, config.force)
    of_answers = " of answers" if corpus.train.turns else ""
    print(f"text       {corpus.source}, {corpus.train.text_bytes + corpus.val.text_bytes:,} bytes{of_answers}")
    print(f"tokenizer  {corpus.tokenizer.name}, vocabulary of {corpus.tokenizer.n_vocab:,}")
    for label, split in (("train", corpus.train), ("val", corpus.val)):
        per_token = f"{split.text_bytes / split.counted:.2f} bytes per token"
        counted = f", of which {split.counted:,} in answers" if split.turns else ""
        print(f"{label:10} {len(split):,} tokens{counted}, {split.documents:,} documents, {per_token}")
    if corpus.bad_lines:
        print(f"skipped    {corpus.bad_lines:,} bad lines")
    print(f"folder     {corpus.folder}, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    with command():
        main(sys.argv[1:])
