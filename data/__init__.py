"""Documents -> tokens -> batches.

corpus = open_corpus("shakespeare", "bpe:512")  # prepares it the first time
inputs, targets = Batches(corpus.train, block_size=256, batch_size=64, seed=1).batch(step)
"""

import sys

from errors import catch_ctrl_c

if sys.argv[:1] == ["-m"]:  # python -m data.prepare, which Python has not found yet
    catch_ctrl_c()

from data.corpus import Corpus, open_corpus, prepare
from data.files import atomic_file
from data.loader import Batches, map_ahead, validation_batches
from data.tokenizer import end_of_text, from_state, make_tokenizer, to_state

__all__ = [
    "Batches", "Corpus", "atomic_file", "end_of_text", "from_state", "make_tokenizer", "map_ahead", "open_corpus",
    "prepare", "to_state", "validation_batches",
]  # fmt: skip
