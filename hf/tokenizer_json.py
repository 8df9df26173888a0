"""A tokenizer in the file format of Hugging Face's tokenizers package, tokenizer.json."""

import json

from data.hub_tokenizer import HubTokenizer, byte_letters
from data.tokenizer import is_char


def tokenizer_json(tokenizer):
    """The contents of tokenizer.json, dicts and lists, for any tokenizer."""
    if isinstance(tokenizer, HubTokenizer):
        return json.loads(tokenizer.text)
    ranks = tokenizer._mergeable_ranks
    if is_char(tokenizer):
        vocabulary = {token.decode(): rank for token, rank in ranks.items()} | tokenizer._special_tokens
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": ""}  # no unknown token: other text is an error
        steps, decoder = [], {"type": "Fuse"}
    else:
        merges = [[letters_of(part) for part in pair] for pair in merged_pairs(ranks)]
        model = {"type": "BPE", "vocab": vocabulary_of(tokenizer), "merges": merges, "ignore_merges": True}
        decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        steps = [decoder]
    options = {"special": True} | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": index, "content": name, **options} for name, index in tokenizer._special_tokens.items()]
    split = {"type": "Split", "pattern": {"Regex": tokenizer._pat_str}, "behavior": "Isolated", "invert": False}
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, *steps]}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    return {"version": "1.0", "added_tokens": added, "pre_tokenizer": pre_tokenizer, "model": model,
            "decoder": decoder, **nothing}  # fmt: skip


def merged_pairs(ranks):
    """All pairs of tokens that join to a token, by its rank: tiktoken merges any of them, in this order."""
    for token in sorted(ranks, key=ranks.get):
        for cut in range(1, len(token)):
            if token[:cut] in ranks and token[cut:] in ranks:
                yield token[:cut], token[cut:]


def vocabulary_of(tokenizer):
    """{text: id} of the tokens of a tiktoken.Encoding, whose bytes letters_of() writes."""
    return {letters_of(token): rank for token, rank in tokenizer._mergeable_ranks.items()} | tokenizer._special_tokens


def letters_of(token):
    """Bytes as text, as in GPT-2's vocabulary."""
    return "".join(byte_letters()[byte] for byte in token)
