"""README.md and docs/results.md show what the CSV files of benchmarks/results say."""

import re
import shutil

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
