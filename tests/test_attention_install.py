"""attention/ installed by itself, where none of our other folders and dependencies can be imported."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CALL = """
import json, pkgutil, sys
for name in ("kernels", "model", "training", "tiktoken", "tyro", "tqdm", "requests", "matplotlib", "wandb"):
    sys.modules[name] = None
sys.path.insert(0, sys.argv[1])
import torch
import attention as package
from attention import attention, attention_qkv
for module in pkgutil.walk_packages(package.__path__, "attention."):
    __import__(module.name)
device = sys.argv[2]
q, k, v = (torch.randn(2, 64, heads, 32, device=device, requires_grad=True) for heads in (4, 2, 2))
out = attention(q, k, v, causal=True, window=20)
exact = attention(*(x.double() for x in (q, k, v)), causal=True, window=20, impl="reference")
out.sum().backward()
attention_qkv(torch.cat([x.flatten(2) for x in (q, k, v)], 2), 4, 2)
print(json.dumps({"error": (out - exact).abs().max().item(), "from": sys.modules["attention"].__file__}))
"""


def test_only_versions_of_triton_that_were_tested():
    """The kernels are launched by Triton's own interfaces, which may change with any version: launcher.py."""
    wanted = []
    for folder in (ROOT, ROOT / "attention"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        wanted += [Requirement(x).specifier for x in project["dependencies"] if x.startswith("triton")]
    ours, of_the_folder = wanted
    assert ours == of_the_folder and version("triton") in ours and "3.10.0" not in ours


def test_modules_import_in_one_direction():
    """Imports within functions count too: a reader can begin with a file that needs no other, and go on from there."""
    imported = {}
    for path in (ROOT / "attention").rglob("*.py"):
        names = imported[path] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level > 0:
                folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                modules = [folder.with_suffix(".py"), *(folder / f"{x.name}.py" for x in node.names)]
                names.update(x for x in modules if x.exists())
    order = [*TopologicalSorter(imported).static_order()]  # raises CycleError with the files of a cycle
    assert order.index(ROOT / "attention/features.py") < order.index(ROOT / "attention/api.py")


@pytest.mark.slow
def test_attention_installs_and_runs_alone(tmp_path, device):
    site = tmp_path / "site"
    folder = tmp_path / "attention"  # a copy, because pip writes files into the folder
    left_out = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "attention", folder, ignore=left_out)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", site, folder], check=True)
    (installed,) = distributions(path=[str(site)])
    assert {re.match(r"[\w-]+", line)[0] for line in installed.requires} == {"torch", "triton"}
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-I", "-c", CALL, site, device]  # -I leaves out this folder and PYTHONPATH
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["error"] < 1e-5 and Path(found["from"]).is_relative_to(site)
