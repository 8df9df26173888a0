"""Text -> tokens -> batches.

    corpus = open_corpus("shakespeare", "bpe:512")  # prepares it the first time
    inputs, targets = Batches(corpus.train, block_size=256, batch_size=64, seed=1).batch(step)

`python -m data.prepare NAME` prepares a corpus by hand. Token files are described in tokens.py.
"""

from data.corpus import Corpus, open_corpus
from data.files import atomic_file, spare_path
from data.loader import Batches, validation_batches
from data.tokenizer import CharTokenizer, fingerprint, from_state, make_tokenizer, to_state
from data.tokens import TokenFileError, Tokens, check_tokenizer, read_tokens, write_tokens

__all__ = [
    "Batches",
    "CharTokenizer",
    "Corpus",
    "TokenFileError",
    "Tokens",
    "atomic_file",
    "check_tokenizer",
    "fingerprint",
    "from_state",
    "make_tokenizer",
    "open_corpus",
    "read_tokens",
    "spare_path",
    "to_state",
    "validation_batches",
    "write_tokens",
]
