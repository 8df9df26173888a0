"""attention/ installed by itself, where nothing else than its dependencies can be imported."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest

CALL = """
import json, pkgutil, sys
sys.path.append(sys.argv[1])
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


def with_dependencies(name, found=()):
    """Names of a distribution and of all that it needs on this machine."""
    found = {*found, name}
    for line in distribution(name).requires or []:
        needed, _, marker = line.partition(";")
        needed = re.match(r"[\w.-]+", needed)[0]
        if needed not in found and "extra" not in marker:
            try:
                found = with_dependencies(needed, found)
            except ModuleNotFoundError:  # another system or Python needs it
                continue
    return found


@pytest.mark.slow
def test_attention_installs_and_runs_alone(tmp_path, device):
    site = tmp_path / "site"
    folder = tmp_path / "attention"  # a copy, because pip writes files into the folder
    left_out = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(Path(__file__).parents[1] / "attention", folder, ignore=left_out)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", site, folder], check=True)
    (installed,) = distributions(path=[str(site)])
    names = {re.match(r"[\w-]+", line)[0] for line in installed.requires}
    assert names == {"torch", "triton"}
    for name in set().union(*map(with_dependencies, names)):
        for top in {file.parts[0] for file in distribution(name).files if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution(name).locate_file(top))
    # Triton's interpreter needs NumPy, which Triton does not declare
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # -I and -S leave out this folder, PYTHONPATH and all other packages
    command = [sys.executable, "-I", "-S", "-c", CALL, site, device]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["error"] < 1e-5 and Path(found["from"]).is_relative_to(site)
