"""Make a corpus of source code and documentation from the Python packages installed here: one document a file.

    python benchmarks/packages.py packages.jsonl.zst
    python train.py configs/gpt2.py --data text --input packages.jsonl.zst --steps 2000 --batch_size 32

Other packages give another corpus, so give its sha256, which is printed, with every figure.
"""

import hashlib
import json
import sys
import sysconfig
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".c", ".cpp", ".h", ".cu", ".cuh"}
SMALLEST, LARGEST = 200, 500_000  # bytes; larger files are mostly tables


def documents(folder):
    """Yield (path below the folder, text) of its files of code and documentation, each text once, sorted by path."""
    seen = set()
    for path in sorted(folder.rglob("*")):
        if path.suffix not in SUFFIXES or not path.is_file() or not SMALLEST <= path.stat().st_size <= LARGEST:
            continue
        contents = path.read_bytes()
        digest = hashlib.sha256(contents).digest()
        try:
            text = contents.decode()
        except UnicodeDecodeError:
            continue
        if digest not in seen:
            seen.add(digest)
            yield path.relative_to(folder), text


def main():
    import pyarrow

    from data.shards import file_sha256

    if len(sys.argv) != 2 or not sys.argv[1].endswith(".jsonl.zst"):
        sys.exit("usage: python benchmarks/packages.py FILE.jsonl.zst")
    output, count, sizes = Path(sys.argv[1]), 0, Counter()
    with pyarrow.output_stream(output, compression="zstd") as file:
        for path, text in documents(Path(sysconfig.get_paths()["purelib"])):
            file.write(json.dumps({"path": str(path), "text": text}).encode() + b"\n")
            sizes[path.suffix] += len(text.encode())
            count += 1
    print(f"{count:,} documents, {sum(sizes.values()) / 1e6:,.1f} MB of text: ", end="")
    print(", ".join(f"{suffix} {size / 1e6:.1f}" for suffix, size in sizes.most_common()))
    print(f"{output}: {output.stat().st_size / 1e6:,.1f} MB, sha256 {file_sha256(output)}")


if __name__ == "__main__":
    main()
