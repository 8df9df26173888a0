"""Tokens that another program prepared, used as they are.

nanoGPT's train.bin and val.bin, uint16 without a header; and *_train_*.bin and *_val_*.bin of llm.c and
modded-nanogpt, with the header of data.shards.
"""

import numpy as np

from data.shards import FORMATS, HEADER_BYTES, SPLITS, file_sha256, map_shard
from data.tokenizer import end_of_text, make_tokenizer, to_state
from errors import require

CHUNK = 1 << 24  # tokens that are checked at once


def token_files(folder, split):
    """The files of a split: nanoGPT's SPLIT.bin, or else those with a header; UserError if there are none."""
    plain = folder / f"{split}.bin"
    files = [plain] if plain.is_file() else sorted({*folder.glob(f"*_{split}*.bin"), *folder.glob(f"{split}_*.bin")})
    require(files, f"{folder} has no {split}.bin and no *_{split}_*.bin; nanoGPT and llm.c write such files")
    return files


def index_tokens(source, tokenizer_spec):
    """Check token files; returns a manifest that points to them. They do not name the tokenizer that made them."""
    rule = f"tokenizer {tokenizer_spec!r} is made from text, which token files lack; name gpt2 or bytes"
    require(not tokenizer_spec.startswith(("char", "bpe")), rule)
    tokenizer = make_tokenizer(tokenizer_spec)
    vocabulary, special = tokenizer.n_vocab, set(tokenizer._special_tokens.values())
    lengths = [0 if index in special else len(tokenizer.decode_bytes([index])) for index in range(vocabulary)]
    manifest = {"tokenizer": to_state(tokenizer)}
    for split in SPLITS:
        shards, counts = [], np.zeros(vocabulary, np.int64)
        for path in token_files(source.folder, split):
            dtype, offset, tokens = _layout(path)
            same = manifest.setdefault("dtype", dtype) == dtype
            require(same, f"{path} has ids of another type than the files before it; take files of one program")
            require(tokens, f"{path} has no tokens; get the file again")
            ids = map_shard(path, dtype, tokens, offset)
            rule = f"but {tokenizer_spec} has {vocabulary:,} tokens; name the --tokenizer that made it"
            for start in range(0, tokens, CHUNK):
                found = ids[start : start + CHUNK]
                require(found.max() < vocabulary, f"{path} has the id {found.max()}, {rule}")
                counts += np.bincount(found, minlength=vocabulary)
            shards.append(dict(file=str(path.resolve()), tokens=tokens, sha256=file_sha256(path), offset=offset))
        end = end_of_text(tokenizer)
        manifest[split] = dict(
            shards=shards,
            tokens=int(counts.sum()),
            documents=1 if end is None else max(1, int(counts[end])),
            text_bytes=int(counts @ lengths),
        )
    return manifest


def _layout(path):
    """(dtype, offset, tokens) of a token file."""
    magic, version, tokens, *_ = [*np.fromfile(path, "<i4", count=3).tolist(), 0, 0, 0]
    for dtype, known in FORMATS.items():
        if (magic, version) == known:
            return dtype, HEADER_BYTES, tokens
    return "<u2", 0, path.stat().st_size // 2
