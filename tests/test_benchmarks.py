"""Benchmarks: each runs with --small on a CPU and prints its table; pages show what the CSV files of results say."""

import re
import shlex
import shutil
from statistics import mean

import pytest
import torch
from helpers import FAST, ROOT, finish, start
from problems import ON_GPU

from benchmarks import draw

RUN = " ".join(f"--{name}={value}" for name, value in FAST.items() if name != "input")
PLAY = ROOT / "data/play.txt"
SMALL = [
    "attention.py --small --implementations triton flash --csv {folder}/attention.csv",
    "attention.py --here --small",
    f"small_chips.py 86 --configs shakespeare_char {RUN} --n_head=1 --batch_size=1 --input={PLAY}",
    "sampling.py --small --transformers",
    f"training.py --small --text {PLAY} --jobs char --with=--n_layer=1",
    f"step_parts.py {ROOT}/configs/shakespeare_char.py {RUN} --input={PLAY}",
    "distributed.py --small --gpus 1 2 --parts xl",
    f"recipes.py {ROOT}/configs/shakespeare_char.py {ROOT}/benchmarks/changes/recipe.txt --tokens 0.01M "
    f"--csv {{folder}}/found.csv '--options={RUN} --input={PLAY}'",
]


@pytest.mark.slow
@pytest.mark.parametrize("command", SMALL, ids=lambda command: command.split()[0])
def test_small(command, folder):
    script, *argv = shlex.split(command.format(folder=folder))
    interpreted = script in ("attention.py", "small_chips.py") and not ON_GPU
    variables = {"TRITON_INTERPRET": "1"} if interpreted else {}
    process = start(folder, *argv, script=ROOT / "benchmarks" / script, variables=variables)
    output, _ = finish(process)
    version = torch.__version__.partition("+")[0]
    assert any(re.search(r"\d\.\d", line) for line in output.splitlines() if version not in line)
    assert "--transformers" not in argv or "static cache" in output
    own = process.pid if script != "training.py" else "small"  # other tests make such folders at the same time
    assert not (ROOT / "runs" / f"bench-{own}").exists()


@pytest.mark.slow
def test_a_failed_run_stops_no_other(folder):
    """recipes.py measures the runs that are possible, and its exit code says that one failed."""
    (folder / "changes.txt").write_text("missing: --input=nowhere.txt\nfound:\n")
    files = f"{ROOT}/configs/shakespeare_char.py", f"{folder}/changes.txt", f"--csv={folder}/runs.csv"
    options = "--tokens=0.01M", f"--options={RUN} --input={PLAY}"
    process = start(folder, *files, *options, script=ROOT / "benchmarks/recipes.py")
    _, error = finish(process, code=1)
    assert "missing seed 1" in error
    assert [row["name"] for row in draw.rows_of(folder / "runs.csv")] == ["found"]


PEER = """
import sys
from functools import partial
import pytest
import torch
from fla.ops.attn.parallel import parallel_attn
from flash_attn.cute.interface import flash_attn_varlen_func

ours = sys.modules["flash_attn.cute.interface"]
ours.attention = partial(ours.attention, impl="triton")  # on a CPU, too

def randn(*shape):
    return torch.randn(*shape, device="cuda" if torch.cuda.is_available() else "cpu")

def expected(q, k, v, left, right):
    ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] + len(q) - len(k)
    hidden = (ahead < -left) | (ahead > right)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(hidden.to(q.device), float("-inf")).softmax(-1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, v)

@pytest.mark.parametrize("error", [0.0, 0.5])
@pytest.mark.parametrize("left, right", [(3, 0), (2, 2), (4, 1), (7, -2)])
def test_windows_of_padded_rows(left, right, error):
    q, k, v, lengths = randn(2, 9, 2, 12), randn(2, 11, 2, 12), randn(2, 11, 2, 12), [(9, 7), (4, 11)]
    used_q, used_k = torch.tensor(lengths, device=q.device).T
    out, _ = flash_attn_varlen_func(q, k, v, seqused_q=used_q, seqused_k=used_k, window_size=(left, right))
    for row, (m, n) in enumerate(lengths):
        correct = expected(q[row, :m], k[row, :n], v[row, :n], left, right) + error
        torch.testing.assert_close(out[row, :m], correct, rtol=0, atol=5e-3)

@pytest.mark.parametrize("window", range(1, 1000))
@pytest.mark.parametrize("scale", range(1, 1000))
def test_one_token(window, scale):
    q = randn(1, 1, 1, 20)
    torch.testing.assert_close(parallel_attn(q, q, q, None, scale, window), q)

def test_outside():
    parallel_attn(*randn(3, 1, 5, 1, 8), window_size=0)

def test_nothing():
    pass

def test_skipped():
    pytest.skip()
"""


@pytest.mark.slow
def test_tests_of_others(folder):
    (folder / "tests/ops").mkdir(parents=True)
    for name, text in {"attn": PEER, "attn_sink": "", "forgetting_attn": ""}.items():
        (folder / f"tests/ops/test_{name}.py").write_text(text)
    argv = ["--fla", folder, "--cases", 8, "--numprocesses", 2]
    variables = {} if ON_GPU else {"TRITON_INTERPRET": "1"}
    output, _ = finish(start(folder, *map(str, argv), script=ROOT / "benchmarks/peers.py", variables=variables))
    row = next(line for line in output.splitlines() if line.startswith("| attn.py"))
    counts, failed = row.strip("| ").rsplit(" | ", 1)
    assert counts == "attn.py | 12 | 4 | 1 | no call of attention(): 1, window of 0 keys: 1"
    wrong = {f"test_windows_of_padded_rows[{window}-0.5]" for window in ("3-0", "2-2", "4-1", "7--2")}
    assert set(failed.split("; ")) == wrong


def test_pages_and_charts_are_drawn():
    for page in draw.PAGES:
        text = (ROOT / page).read_text()
        same = draw.drawn(text) == text
        assert same and "<!-- end -->" in text, f"draw {page} again: python benchmarks/all.py tables"
    for name, (rows, _) in draw.chart_rows().items():
        assert draw.digest(rows) in (ROOT / name).read_text(), f"draw {name} again: python benchmarks/all.py tables"


def test_figures_in_sentences_follow_from_the_files():
    """README and docs/recipes.md round what the CSV files say."""
    charts, causal = draw.chart_rows(), {}
    *_, best, ours, theirs = draw.against_nanogpt(charts["docs/images/losses.svg"][0])
    ours_ms, theirs_ms = (float(row["ms a step"]) for row in draw.read("books") if row["job"] == "books")
    first, later = (float(row["s in all"].split()[0]) for row in draw.read("shakespeare_cold", "shakespeare"))
    control, recipe = (draw.read(name) for name in ("recipe_control", "recipe_seeds"))
    tokens, seconds = (mean(draw.numbers(recipe, of)) / mean(draw.numbers(control, of)) for of in ("tokens", "seconds"))
    for row in charts[draw.CHART][0]:
        # of this commit, most sequences are empty
        unfair = row["panel"] == "GPT-2 documents of 800" and row["commit"] == "503b5b5"
        if row["direction"] == "both" and row["causal"] == "True" and not unfair:
            causal.setdefault(row["implementation"], {})[row["panel"], row["length"]] = float(row["ms"])
    ratios = {
        peer: [times[cell] / causal["hopper"][cell] for cell in times]
        for peer, times in causal.items()
        if peer in ("flash", "cudnn", "flash4")
    }
    extremes = {peer: (min(found), max(found)) for peer, found in ratios.items()}
    ahead = sum(ratio > 1 for ratio in ratios["flash4"]), len(ratios["flash4"])
    said = {
        r"nanoGPT's best loss after (\d+) s in place of (\d+) s": (ours, theirs),
        r"nanoGPT's best, ([\d.]+), after (\d+) s, nanoGPT after (\d+) s": (best, ours, theirs),
        r"in ([\d.]+) of that one's time": (seconds,),
        r"with ([\d.]+) of its tokens and in ([\d.]+) of its time": (tokens, seconds),
        r"a step takes (\d+) % less": (100 - 100 * ours_ms / theirs_ms,),
        r"([\d.]+) to ([\d.]+) times as fast as PyTorch's": extremes["flash"],
        r"([\d.]+) to ([\d.]+) times as fast as its cuDNN": extremes["cudnn"],
        r"([\d.]+) to ([\d.]+) times as fast as flash-attn-4": extremes["flash4"],
        r"flash-attn-4, ahead in (\d+) of (\d+) cases": ahead,
        r"(\d+) s; (\d+) s the first time": (later, first),
    }
    text = " ".join(" ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/recipes.md"))
    for pattern, values in said.items():
        for figure, value in zip(re.search(pattern, text).groups(), values, strict=True):
            assert round(value, len(figure.partition(".")[2])) == float(figure), f"{pattern}: {value}"


def test_each_figure_of_a_file_has_its_command(folder):
    output, _ = finish(start(folder, "--list", script=ROOT / "benchmarks/all.py"))
    commands = dict(line.split(maxsplit=1) for line in output.splitlines())
    for path in (ROOT / "benchmarks/results").glob("*.csv"):
        if changes := re.search(r"benchmarks/changes/\S+", commands[path.stem]):
            names = re.findall(r"^([^#\n]+?):", (ROOT / changes[0]).read_text(), re.MULTILINE)
            assert {row["name"] for row in draw.rows_of(path)} <= set(names), f"{path} has runs without a command"


def test_a_changed_figure_is_drawn_once(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("Speed: <!-- attention_readme -->\n\nold\n\n<!-- end -->")
    shutil.copytree(ROOT / "benchmarks/results", tmp_path / "benchmarks/results")
    shutil.copytree(ROOT / "docs/images", tmp_path / "docs/images")
    measured = tmp_path / "benchmarks/results/attention_128.csv"
    speed = r"(d128 causal,.*,hopper,both,[\d.]+,)[\d.]+"
    measured.write_text(re.sub(speed, r"\g<1>1234", measured.read_text()))
    monkeypatch.setattr(draw, "ROOT", tmp_path)
    monkeypatch.setattr(draw, "PAGES", [page.name])
    draw.main()
    assert page.read_text().count("| 1234 |") == 1
    assert capsys.readouterr().out == f"drew the tables of page.md\ndrew {draw.CHART}\n"
    draw.main()
    assert capsys.readouterr().out == ""
