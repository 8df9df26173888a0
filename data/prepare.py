"""Prepare a corpus by hand.

python -m data.prepare shakespeare [--input FILE] [--tokenizer bpe:512]
python -m data.prepare text --input FILE_OR_FOLDER [--tokenizer bpe:512]
"""

import argparse
import sys

from data.corpus import prepare, read_corpus

__all__ = ["main", "prepare"]


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"{message}; see python -m data.prepare --help")


def main(argv=None):
    """Run the command line `argv` (sys.argv[1:] when None); returns the exit status."""
    parser = _Parser(prog="python -m data.prepare", description="Tokenize a corpus for train.py.")
    parser.add_argument("name", metavar="NAME", help="shakespeare or text")
    parser.add_argument("--input", help="text file or folder; for shakespeare a local copy of the file")
    parser.add_argument("--tokenizer", default="bpe:512", help="bytes, char, bpe:N, gpt2[:RANK_FILE]")
    try:
        args = parser.parse_args(argv)
        report(read_corpus(args.name, prepare(args.name, args.tokenizer, args.input)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def report(corpus):
    """Print the numbers by which one sees that a corpus is what one meant."""
    tokenizer = corpus.tokenizer
    print(f"text       {corpus.source}, {corpus.train.text_bytes + corpus.val.text_bytes:,} bytes")
    print(f"tokenizer  {tokenizer.name}, vocabulary of {tokenizer.n_vocab:,}")
    for label, part in (("train", corpus.train), ("val", corpus.val)):
        print(f"{label:10} {len(part):,} tokens, {part.bytes_per_token:.2f} bytes per token")
    print(f"sample     {tokenizer.decode(corpus.train.ids.read(0, 20).tolist())!r}")
    print(f"folder     {corpus.folder}")


if __name__ == "__main__":
    sys.exit(main())
