"""Time the data path: preparation beside tiktoken alone, its memory, a kill -9 in the middle, and loading of batches.

    python benchmarks/data.py --ranks FILE [--megabytes 1000] [--input FILE_OR_FOLDER]

FILE is GPT-2's r50k_base.tiktoken. Without --input the documents are random lines of data/play.txt, in a .jsonl.zst.
Preparation runs in processes of its own; their peak memory counts from after their imports.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

PREPARE = """
import json, re, sys, time
from data.corpus import prepare
memory = lambda name: int(re.search(rf"{name}:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1000
before, start = memory("VmRSS"), time.perf_counter()  # ru_maxrss would count the parent's memory too
made = prepare("text", sys.argv[1], sys.argv[2])
seconds, parts = time.perf_counter() - start, (made.train, made.val)
print(json.dumps(dict(
    seconds=seconds, memory=memory("VmHWM") - before, megabytes=sum(part.text_bytes for part in parts) / 1e6,
    documents=sum(part.documents for part in parts), tokens=sum(map(len, parts)), sha256=made.sha256,
)))
"""
SAMPLE = 100  # megabytes of text that tiktoken encodes alone
BATCHES = 200


def make_documents(path, megabytes):
    """Write about this much text: documents of 1 to 80 lines of the play in random order, each with a number."""
    import pyarrow

    lines, draw, written = (ROOT / "data/play.txt").read_text().splitlines(), random.Random(0), 0
    with pyarrow.output_stream(path, compression="zstd") as file:
        for number in itertools.count():
            text = "\n".join([f"Scene {number}", *draw.choices(lines, k=draw.randint(1, 80))])
            file.write(json.dumps({"text": text}).encode() + b"\n")
            written += len(text.encode())
            if written >= megabytes * 1e6:
                return


def tiktoken_alone(tokenizer, input):
    """MB/s of encode_ordinary_batch on all cores, on the first documents of the input, read beforehand."""
    from data.build import cores
    from data.documents import read_blocks, texts_of
    from data.sources import find_source

    texts, size = [], 0
    blocks = itertools.chain.from_iterable(map(read_blocks, find_source("text", input).files))
    while size < SAMPLE * 1e6 and (block := next(blocks, None)):
        found, _ = texts_of(block)
        texts, size = texts + found, size + sum(len(text.encode()) for text in found)
    start = time.perf_counter()
    tokenizer.encode_ordinary_batch(texts, num_threads=cores())
    return size / 1e6 / (time.perf_counter() - start)


def start_preparing(spec, input, folder):
    command, variables = [sys.executable, "-c", PREPARE, spec, input], os.environ | {"GPT_DATA": str(folder)}
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)


def prepare_and_kill(spec, input, folder, seconds):
    """Kill -9 after some seconds, then prepare to the end; returns the second process's figures."""
    process = start_preparing(spec, input, folder)
    time.sleep(seconds)
    process.kill()
    assert process.wait() != 0, "it ended before it was killed"
    return json.loads(start_preparing(spec, input, folder).communicate()[0])


def load_batches(spec, input):
    """Median milliseconds to load half a million tokens."""
    from data import Batches, open_corpus

    batches, times = Batches(open_corpus("text", spec, input).train, 1024, 512, seed=1), []
    for step in range(BATCHES):
        start = time.perf_counter()
        batches.batch(step)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", required=True)
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--input", type=Path)
    options = parser.parse_args()
    from data.build import cores
    from data.tokenizer import make_tokenizer

    spec = f"gpt2:{Path(options.ranks).resolve()}"
    with tempfile.TemporaryDirectory() as folder:
        folder, input = Path(folder), options.input and options.input.resolve()
        if input is None:
            make_documents(input := folder / "documents.jsonl.zst", options.megabytes)
        before = tiktoken_alone(make_tokenizer(spec), input)
        whole = json.loads(start_preparing(spec, input, folder / "whole").communicate()[0])
        alone = max(before, tiktoken_alone(make_tokenizer(spec), input))  # other work may have slowed one of them
        rate = whole["megabytes"] / whole["seconds"]
        print(f"text        {whole['megabytes']:,.0f} MB, {whole['documents']:,} documents, {whole['tokens']:,} tokens")
        print(f"tiktoken    {alone / cores():.2f} MB/s per core, alone, {cores()} cores")
        print(f"prepare     {rate / cores():.2f} MB/s per core = {rate / alone:.0%}, {whole['seconds']:.1f} s")
        print(f"memory      {whole['memory']:.0f} MB beyond the imports")
        again = prepare_and_kill(spec, input, folder / "killed", whole["seconds"] / 2)
        same = "the same" if again["sha256"] == whole["sha256"] else "OTHER"
        print(f"kill -9     after {whole['seconds'] / 2:.0f} s, then {again['seconds']:.1f} s: {same} hashes")
        os.environ["GPT_DATA"] = str(folder / "whole")
        print(f"batches     {load_batches(spec, input):.2f} ms for 524,288 tokens")


if __name__ == "__main__":
    main()
