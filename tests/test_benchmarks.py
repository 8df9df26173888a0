"""Benchmarks: each runs with --small on a CPU and prints its table; pages show what the CSV files of results say."""

import re
import shlex
import shutil

import pytest
from helpers import FAST, ROOT, finish, start
from problems import ON_GPU

from benchmarks import draw

RUN = " ".join(f"--{name}={value}" for name, value in FAST.items() if name != "input")
PLAY = ROOT / "data/play.txt"
SMALL = [
    "attention.py --small --implementations triton flash --csv {folder}/attention.csv",
    "attention.py --here --small",
    f"small_chips.py 86 --configs shakespeare_char {RUN} --n_head=1 --batch_size=1 --input={PLAY}",
    "sampling.py --small",
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
    assert re.search(r"\d\.\d", output)
    own = process.pid if script != "training.py" else "small"  # other tests make such folders at the same time
    assert not (ROOT / "runs" / f"bench-{own}").exists()


def test_pages_and_charts_are_drawn():
    for page in draw.PAGES:
        text = (ROOT / page).read_text()
        same = draw.drawn(text) == text
        assert same and "<!-- end -->" in text, f"draw {page} again: python benchmarks/all.py tables"
    for name, (rows, _) in draw.chart_rows().items():
        assert draw.digest(rows) in (ROOT / name).read_text(), f"draw {name} again: python benchmarks/all.py tables"


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
