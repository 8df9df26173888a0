"""Measure most figures of README.md and docs/ anew, in parts of at most ten minutes.

    python benchmarks/all.py --list                            the parts, with their commands
    python benchmarks/all.py overhead step_gpt2 --text FILE    run parts; each writes benchmarks/results/PART.csv
    python benchmarks/all.py tables                            draw tables and charts of the pages from these files

A file holds the table that a part prints, with chip, commit and versions in each row. Parts of recipes.py go on where
they were, so run them until they start no more runs; a file is begun anew if a row of it is of another commit, chip or
version.

benchmarks/pictures.py draws the pictures of docs/attention.md, with what errors and timeline measured.

--text is tiny Shakespeare, --books the folder that `recipes.py split` wrote, for few_books* with --megabytes 58.5, else
with 220; --ranks is GPT-2's r50k_base.tiktoken, --nanogpt, --flash_attention and --fla are checkouts. Paths are
relative to the repository. The first run on a machine compiles kernels, so run gpt2 and recipe_seeds before books.
"""

import shlex
import subprocess
import sys
import time
from pathlib import Path

from harness import ROOT, command_line, machine, save

from benchmarks import draw

RESULTS = ROOT / "benchmarks" / "results"
TRAINING = "benchmarks/training.py --ranks {ranks} --text "
FP8 = (
    " --batch_size 32 --learning_rate 6e-4 --min_learning_rate 6e-5 --warmup_steps 200 --beta2 0.95 --weight_decay 0.1 "
    "--eval_batches 50' --tokens 50M --seeds 1 2"
)


def recipe(config, changes, rest, tokenizer="gpt2:{ranks}"):
    start = f"benchmarks/recipes.py configs/{config}.py benchmarks/changes/{changes}.txt --seconds 560 --csv {{csv}}"
    return start + f" '--options=--input {{books}}/train --tokenizer {tokenizer}{rest}"


PARTS = {
    "attention_64": "benchmarks/attention.py --cells d64 GPT-2 --csv {csv}",
    "attention_128": "benchmarks/attention.py --cells 'd128 causal' --csv {csv}",
    "attention_128_rest": "benchmarks/attention.py --cells 'd128 full' 'd128 window' 'd128 documents' --csv {csv}",
    "attention_256": "benchmarks/attention.py --cells d256 --csv {csv}",
    "overhead": "benchmarks/attention.py --overhead --implementations hopper triton flash cudnn flash4",
    "gpt2_cold": TRAINING + "{text} --nanogpt {nanogpt} --jobs gpt2 --whole --cold",
    "gpt2": TRAINING + "{text} --nanogpt {nanogpt} --jobs gpt2 --rounds 3 --with=--fp8",
    "gpt2_documents": TRAINING + "{books}/train --jobs gpt2 --rounds 3 --with=--mask_documents",
    "laptop": "benchmarks/training.py --text {text} --nanogpt {nanogpt} --jobs laptop --whole --rounds 3",
    "char_cold": TRAINING + "{text} --nanogpt {nanogpt} --jobs char --cold",
    "char": TRAINING + "{text} --nanogpt {nanogpt} --jobs char --rounds 3",
    "shakespeare_cold": TRAINING + "{text} --jobs shakespeare --whole --cold",
    "shakespeare": TRAINING + "{text} --jobs shakespeare --whole --rounds 5",
    "books": TRAINING + "{books}/train --nanogpt {nanogpt} --jobs books recipe --whole",
    "step_gpt2": "benchmarks/step_parts.py configs/gpt2.py --data text --input {text} --tokenizer gpt2:{ranks} "
    "--batch_size 32",
    "step_char": "benchmarks/step_parts.py configs/shakespeare_char.py --input {text}",
    "peers": "benchmarks/peers.py --flash_attention {flash_attention} --fla {fla}",
    "chip_80": "benchmarks/small_chips.py 80",
    "chip_86": "benchmarks/small_chips.py 86",
    "fp8": recipe("gpt2_books", "fp8", FP8),
    "recipe_seeds": recipe("modern", "recipe", "' --tokens 36M --seeds 1 2 3 4 5 --test {books}/test.txt"),
    "recipe_control": recipe("gpt2_books", "control_alone", "' --tokens 150M --seeds 1 2 --test {books}/test.txt"),
    "recipe_parts": recipe("modern", "modern_without", "' --tokens 36M"),
    "tuning": recipe("gpt2_books", "control", "' --tokens 50M"),
    "tuning_long": recipe("gpt2_books", "control_long", "' --tokens 150M"),
    "few_books": recipe("modern", "few_books", "' --tokens 48M"),
    "few_books_control": recipe("gpt2_books", "control_alone", "' --tokens 96M"),
    "depths": recipe("modern", "depths", "' --seeds 1 2", tokenizer="bpe:8192"),
    "sampling_text": "benchmarks/sampling.py --parts text --nanogpt {nanogpt} --transformers",
    "sampling_attention": "benchmarks/sampling.py --parts attention",
    "errors": "benchmarks/errors.py",
    "timeline": "benchmarks/timeline.py",
    "two_gpus_ddp": "benchmarks/distributed.py --gpus 1 2 --parts ddp",
    "two_gpus_xl": "benchmarks/distributed.py --gpus 1 2 --parts xl",
    "one_gpu_largest": "benchmarks/distributed.py --gpus 1 --parts largest",
}


def begin_anew(path):
    """Delete a CSV file whose rows are not all of this chip, commit and versions."""
    here = machine().items()
    if any(here - row.items() for row in draw.rows_of(path)):
        path.unlink()


def measure(part, paths):
    """Run a part, write its table, and return whether it succeeded."""
    start, printed, path = time.perf_counter(), [], RESULTS / f"{part}.csv"
    argv = shlex.split(PARTS[part].format(**paths, csv=path))
    print(f"\n{part}: python {shlex.join(argv)}", flush=True)
    if "--csv" in argv:
        begin_anew(path)
    process = subprocess.Popen([sys.executable, *argv], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith("| "):
            printed.append(line[2:-3].split(" | "))
    code = process.wait()
    if code == 0 and printed and "--csv" not in argv:
        head, _, *rows = printed
        save([machine() | dict(zip(head, row, strict=True)) for row in rows], path)
    print(f"{part}: exit code {code}, {time.perf_counter() - start:.0f} s", flush=True)
    return code == 0


def main():
    parser = command_line(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--list", action="store_true")
    for name in ("text", "books", "ranks", "nanogpt", "flash_attention", "fla"):
        parser.add_argument(f"--{name}", type=Path, default=Path(name.upper()), help="relative to the repository")
    args = parser.parse_args()
    if unknown := set(args.parts) - {*PARTS, "tables"}:
        parser.error(f"there is no part {' or '.join(sorted(unknown))}; --list prints all")
    if args.list:
        for part, command in PARTS.items():
            print(f"{part:20} python {command}")
    done = [draw.main() if part == "tables" else measure(part, vars(args)) for part in args.parts]
    sys.exit("error: a part failed" if False in done else 0)


if __name__ == "__main__":
    main()
