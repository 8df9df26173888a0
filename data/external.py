"""Tokens that another program prepared, used as they are.

nanoGPT's train.bin and val.bin, uint16 without a header; and *_train_*.bin and *_val_*.bin of llm.c and
modded-nanogpt, with the header of data.shards.
"""

import numpy as np

from data.build import Options, make_request, read_record
from data.shards import FORMATS, HEADER_BYTES, PARTS, file_sha256, map_shard, token_files
from data.tokenizer import end_of_text, make_tokenizer, to_state, tokenizer_name

CHUNK = 1 << 24  # tokens that are checked at once


def index_tokens(source, tokenizer_spec):
    """Check token files; returns the contents of a manifest that points to them.

    Args:
        source: Source of the files.
        tokenizer_spec: the tokenizer that made them: gpt2, gpt2:RANK_FILE, bytes or bytes+eot. Only our files name it.

    Raises:
        ValueError: an id is not in the vocabulary, or a file is damaged.
    """
    name, folder = tokenizer_name(tokenizer_spec), source.files[0].parent
    if name.startswith(("char", "bpe")):
        raise ValueError(f"tokenizer {name!r} is made from text, which token files lack; name gpt2 or bytes")
    if (ours := read_record(folder / "manifest.json")) and ours["request"]["tokenizer"] != name:
        raise ValueError(f"{folder} has tokens of the tokenizer {ours['request']['tokenizer']}, not of {name}")
    record = {"request": make_request(source, tokenizer_spec, Options()), "dtype": None}
    tokenizer = make_tokenizer(tokenizer_spec)
    special = set(tokenizer._special_tokens.values())
    lengths = [0 if i in special else len(tokenizer.decode_single_token_bytes(i)) for i in range(tokenizer.n_vocab)]
    for part in PARTS:
        record[part] = {"shards": [], "tokens": 0}
        counts = np.zeros(tokenizer.n_vocab, np.int64)
        for path in token_files(folder, part):
            dtype, offset, tokens = _layout(path)
            if record["dtype"] not in (None, dtype):
                raise ValueError(f"{path} has ids of another type than the files before it; take files of one program")
            if tokens == 0:
                raise ValueError(f"{path} has no tokens; get the file again")
            ids = map_shard(path, dtype, tokens, offset)
            for start in range(0, tokens, CHUNK):
                found = ids[start : start + CHUNK]
                if found.max() >= len(counts):
                    raise ValueError(
                        f"{path} has the id {found.max()}, but {tokenizer_spec} has {len(counts):,} tokens; "
                        "name the --tokenizer that made it"
                    )
                counts += np.bincount(found, minlength=len(counts))
            shard = {"file": str(path.resolve()), "tokens": tokens, "sha256": file_sha256(path), "offset": offset}
            record[part]["shards"].append(shard)
            record[part]["tokens"] += tokens
            record["dtype"] = dtype
        end = end_of_text(tokenizer)
        record[part]["documents"] = 1 if end is None else max(1, int(counts[end]))
        record[part]["text_bytes"] = int(counts @ np.array(lengths))
        if record[part]["text_bytes"] == 0:
            raise ValueError(f"the {part} files in {folder} have no text, only end-of-text tokens; get them again")
    return record | {"tokenizer": to_state(tokenizer)}


def _layout(path):
    """(dtype, offset, tokens) of a token file."""
    magic, version, tokens = [*np.fromfile(path, "<i4", count=3), 0, 0, 0][:3]
    for dtype, known in FORMATS.items():
        if (magic, version) == known:
            return dtype, HEADER_BYTES, int(tokens)
    return "<u2", 0, path.stat().st_size // 2
