"""What the plugin says to versions that cannot work, and that its norms need torch alone."""

import os
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import fairseq
import pytest
import torch

from powernorm_fairseq import compat
from tests.commands import ROOT


def refused() -> str:
    with pytest.raises(ImportError) as error:
        compat.check_versions()
    return str(error.value)


def test_the_installed_ones_work():
    compat.check_versions()


def test_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 7, 9))
    assert "Python 3.8 or later" in refused()


def test_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "1.11.0+cu113")
    assert "pip install 'torch>=1.12'" in refused()


@pytest.mark.parametrize("version", ["0.10.2", "0.9.0"])
def test_fairseq(monkeypatch, version):
    monkeypatch.setattr(fairseq, "__version__", version)
    assert f"fairseq {version} is older than 0.12" in refused()


def test_two_distributions(monkeypatch):
    found = {"fairseq": [None], "ve-fairseq": [None]}
    monkeypatch.setattr(metadata, "distributions", lambda name: found.get(name, []))
    message = refused()
    assert "pip uninstall -y fairseq ve-fairseq" in message
    assert f"pip install {compat._fairseq_to_install()}" in message


@pytest.mark.parametrize(
    ("python", "system", "machine", "expected"),
    [
        ((3, 8), "linux", "x86_64", "fairseq==0.12.2"),
        ((3, 10), "darwin", "arm64", "fairseq==0.12.2"),
        ((3, 11), "linux", "x86_64", "ve-fairseq==0.12.3"),
        ((3, 11), "linux", "aarch64", "fairseq-fixed==0.12.3.1"),
        ((3, 12), "darwin", "arm64", "fairseq-fixed==0.12.3.1"),
        ((3, 13), "linux", "x86_64", "fairseq-fixed==0.12.3.1"),
    ],
)
def test_the_same_fairseq_as_in_setup_py(monkeypatch, python, system, machine, expected):
    markers = pytest.importorskip("packaging.requirements")
    monkeypatch.setattr(sys, "version_info", python)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert compat._fairseq_to_install() == f"'{expected}'"
    setup = (ROOT / "setup.py").read_text()
    scope: dict = {}
    exec(setup[setup.index("FAIRSEQ = [") : setup.index("]\n", setup.index("FAIRSEQ = [")) + 1], scope)
    environment = {
        "python_version": "{}.{}".format(*python),
        "sys_platform": system,
        "platform_machine": machine,
    }
    requirements = map(markers.Requirement, scope["FAIRSEQ"])
    chosen = [f"{item.name}{item.specifier}" for item in requirements if item.marker.evaluate(environment)]
    assert chosen == [expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("raise ValueError('mutable default')", "fairseq does not import: ValueError: mutable default"),
        (None, "a folder without fairseq in it"),
    ],
)
def test_a_fairseq_that_does_not_import(tmp_path, content, expected):
    (tmp_path / "fairseq").mkdir()
    if content is not None:
        (tmp_path / "fairseq" / "__init__.py").write_text(content)
    program = "import powernorm_fairseq"
    if content is None:  # a bare folder hides no installed package, so that has to go
        program = without_fairseq(keep=str(tmp_path)) + program
    message = run_python(program, cwd=tmp_path, succeeds=False)
    assert "ImportError" in message
    assert expected in message
    assert f"works on this Python with {compat._fairseq_to_install()}" in message


def without_fairseq(keep: str = "nothing") -> str:
    """Code that hides the installed fairseq, hydra and omegaconf from what follows."""
    return textwrap.dedent(
        f"""
        from importlib.machinery import PathFinder
        find = PathFinder.find_spec
        def find_spec(name, path=None, target=None):
            hidden = name.split(".")[0] in ("fairseq", "hydra", "omegaconf")
            return find(name, [{keep!r}] if hidden else path, target)
        PathFinder.find_spec = find_spec
        """
    )


def run_python(program: str, cwd: Path, succeeds: bool = True) -> str:
    """A fresh Python that finds the checkout's package."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode == 0) == succeeds, done.stdout
    return done.stdout


@pytest.mark.slow
def test_norms_need_torch_alone(tmp_path):
    program = without_fairseq() + textwrap.dedent(
        """
        import sys, torch
        from powernorm_fairseq.norms import create_norm
        x = torch.randn(3, 2, 4)
        print(create_norm("power", 4)(x).shape == x.shape, "fairseq" in sys.modules)
        """
    )
    assert run_python(program, cwd=tmp_path).split() == ["True", "False"]
