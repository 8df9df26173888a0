"""Tokens that another program prepared, used as they are.

nanoGPT's train.bin and val.bin, uint16 without a header; and *_train_*.bin and *_val_*.bin of llm.c and
modded-nanogpt, with the header of data.shards.
"""

import hashlib
from dataclasses import asdict
from pathlib import Path

import numpy as np

from data.build import PARTS, VERSION, Options, write_record
from data.shards import FORMATS, HEADER_BYTES, file_sha256, map_shard
from data.tokenizer import end_of_text, make_tokenizer, to_state, tokenizer_name

CHUNK = 1 << 24  # tokens that are checked at once


def index_tokens(folder, input, tokenizer_spec):
    """Check the token files in a folder and write a manifest that points to them.

    Args:
        folder: for the manifest.
        input: folder with the token files.
        tokenizer_spec: that made them: gpt2, gpt2:RANK_FILE, bytes or bytes+eot. Nothing in the files names it.

    Raises:
        ValueError: there are no such files, an id is not in the vocabulary, or a file is damaged.
        OSError: a file cannot be read.
    """
    if tokenizer_name(tokenizer_spec).startswith(("char", "bpe")):
        raise ValueError(f"tokenizer {tokenizer_spec!r} is made from text, which token files lack; name gpt2 or bytes")
    listing = listing_sha256(input)
    request = dict(version=VERSION, source=Path(input).resolve().name, source_sha256=listing)
    request |= {"options": asdict(Options()), "tokenizer": tokenizer_name(tokenizer_spec)}
    record, tokenizer = {"request": request, "dtype": None}, make_tokenizer(tokenizer_spec)
    special = set(tokenizer._special_tokens.values())
    lengths = [0 if i in special else len(tokenizer.decode_single_token_bytes(i)) for i in range(tokenizer.n_vocab)]
    for part in PARTS:
        record[part] = {"shards": [], "tokens": 0}
        counts = np.zeros(tokenizer.n_vocab, np.int64)
        for path in token_files(input, part):
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
    write_record(folder / "manifest.json", record | {"tokenizer": to_state(tokenizer)})


def token_files(folder, part):
    """The token files of a part: nanoGPT's, or else those with a header; ValueError if there are none."""
    if not folder or not Path(folder).is_dir():
        raise ValueError("data='tokens' needs --input FOLDER, which has the token files")
    folder = Path(folder)
    plain = folder / f"{part}.bin"
    files = [plain] if plain.is_file() else sorted({*folder.glob(f"*_{part}*.bin"), *folder.glob(f"{part}_*.bin")})
    if not files:
        raise ValueError(f"{folder} has no {part}.bin and no *_{part}_*.bin; nanoGPT and llm.c write such files")
    return files


def listing_sha256(folder):
    """Hex digest of names and sizes of the token files in a folder."""
    files = [path for part in PARTS for path in token_files(folder, part)]
    return hashlib.sha256(repr([(path.name, path.stat().st_size) for path in files]).encode()).hexdigest()


def _layout(path):
    """(dtype, offset, tokens) of a token file."""
    magic, version, tokens = [*np.fromfile(path, "<i4", count=3), 0, 0, 0][:3]
    for dtype, known in FORMATS.items():
        if (magic, version) == known:
            return dtype, HEADER_BYTES, int(tokens)
    return "<u2", 0, path.stat().st_size // 2
