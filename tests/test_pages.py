"""README.md and docs/results.md show what the CSV files of benchmarks/results say."""

import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

from benchmarks import draw


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(".git", "runs", "prepared", "__pycache__"))
    return tmp_path / "copy"


def test_pages_and_charts_are_drawn():
    for page in draw.PAGES:
        text = (ROOT / page).read_text()
        same = draw.drawn(text, ROOT) == text
        assert same and "<!-- end -->" in text, f"draw {page} again: python benchmarks/all.py tables"
    for name, (rows, _) in draw.chart_rows(ROOT).items():
        assert draw.digest(rows) in (ROOT / name).read_text(), f"draw {name} again: python benchmarks/all.py tables"


def test_a_changed_figure_is_drawn_once(copy):
    path, page = copy / "benchmarks/results/attention.csv", copy / "docs/results.md"
    number = r"(d128 causal,.*,hopper,both,[\d.]+,)[\d.]+"
    path.write_text(re.sub(number, r"\g<1>1234", path.read_text()))
    before = page.read_text(), (copy / draw.CHART).read_text()
    draw.main(copy)
    after = page.read_text(), (copy / draw.CHART).read_text()
    assert after[0].count("| 1234 |") == 1 and "| 1234 |" not in before[0] and after[1] != before[1]
    files = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()}
    draw.main(copy)
    assert files == {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()}


def test_losses_by_time_are_drawn_when_all_three_are_there(copy):
    machine = "chip,commit,torch,triton,job,trainer,curve\n"
    rows = [("books", "nanoGPT"), ("control", "Kestrel"), ("dial", "Kestrel")]
    chart = copy / "docs/images/losses.svg"
    for job, trainer in rows:
        assert not chart.exists()
        (copy / f"benchmarks/results/{job}.csv").write_text(
            machine + f"X,y,1,2,{job},{trainer},0:5.0:10.9 9:60.0:4.5\n"
        )
        draw.main(copy)
    assert chart.exists()


def test_a_part_writes_what_it_prints(copy):
    """`start` would run for minutes; a script in its place prints its table."""
    (copy / "benchmarks/commands.py").write_text(
        "print('| command | s |'); print('| --- | --- |'); print('| a | 1.5 |')"
    )
    command = [sys.executable, "benchmarks/all.py", "start"]
    done = subprocess.run(command, cwd=copy, env={"COMMIT": "abc"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    head, row = (copy / "benchmarks/results/start.csv").read_text().splitlines()
    assert head == "chip,commit,torch,triton,command,s" and row.split(",")[1] == "abc" and row.endswith(",a,1.5")
    (copy / "benchmarks/commands.py").write_text("import sys; print('| command | s |'); sys.exit(1)")
    assert subprocess.run(command, cwd=copy, env={"COMMIT": "abc"}, capture_output=True).returncode == 1
    assert row in (copy / "benchmarks/results/start.csv").read_text()
