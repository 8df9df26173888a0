"""Prepare a corpus by hand: python -m data.prepare fineweb-edu --tokens 1B --tokenizer gpt2"""

import re
import sys
import time
from pathlib import Path
from typing import Literal

import tyro

from data.build import Options
from data.corpus import prepare

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def main(
    name: Literal["shakespeare", "text", "fineweb-edu", "openwebtext", "tokens"],
    /,
    *,
    input: Path | None = None,
    tokenizer: str = "bpe:512",
    tokens: str = "all",
    val_share: float | None = None,
    text_field: str = "text",
    separator: str = "",
    skip_bad: bool = False,
    sample: str = "10BT",
    shard_tokens: str = "100M",
    threads: int | None = None,
):
    """Tokenize a corpus for train.py, and print its sizes. An interrupted preparation goes on where it was.

    Args:
        name: The corpus: tiny Shakespeare, a text of yours, a data set of the Hugging Face hub, or tokens of nanoGPT,
            llm.c or modded-nanogpt, which are used as they are.
        input: File or folder: .txt, .md, .jsonl, .jsonl.gz, .jsonl.zst, .parquet. For shakespeare, a local copy; for
            tokens, the folder with train.bin and val.bin, or with *_train_*.bin and *_val_*.bin.
        tokenizer: bytes, char, bpe:N, gpt2 or gpt2:RANK_FILE. bytes+eot and char+eot have an end-of-text token.
        tokens: Stop after this many tokens, such as 1B.
        val_share: Share of the documents for validation; None takes 0.005, or 0.1 if there are fewer than 1,000.
        text_field: Field of JSON lines, or column of parquet files, that holds the text.
        separator: A line that separates the documents of a text file, such as '<|endoftext|>'.
        skip_bad: Leave out lines that are no JSON object with a text, and count them.
        sample: Of fineweb-edu: 10BT, 100BT or 350BT.
        shard_tokens: Tokens of a file.
        threads: Threads that tokenize; None takes one for each core.
    """
    start = time.perf_counter()
    options = Options(
        tokens=None if tokens == "all" else number(tokens), val_share=val_share, text_field=text_field,
        separator=separator, skip_bad=skip_bad, sample=sample, shard_tokens=number(shard_tokens),
    )  # fmt: skip
    corpus = prepare(name, tokenizer, input, options, threads)
    print(f"text       {corpus.source}, {corpus.train.text_bytes + corpus.val.text_bytes:,} bytes")
    print(f"tokenizer  {corpus.tokenizer.name}, vocabulary of {corpus.tokenizer.n_vocab:,}")
    for label, part in (("train", corpus.train), ("val", corpus.val)):
        print(
            f"{label:10} {len(part):,} tokens, {part.documents:,} documents, {part.bytes_per_token:.2f} bytes per token"
        )
    if corpus.bad_lines:
        print(f"skipped    {corpus.bad_lines:,} bad lines")
    print(f"folder     {corpus.folder}, {time.perf_counter() - start:.1f} s")


def number(text):
    """An int from text such as 1B, 100M or 4096."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.upper())
    if not found:
        raise ValueError(f"{text!r} is no number of tokens; write it as 1B, 100M or 4096")
    return int(float(found[1]) * UNITS[found[2]])


if __name__ == "__main__":
    try:
        tyro.cli(main, use_underscores=True)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; type the command again to go on")
