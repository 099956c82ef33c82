"""The plugin as its users load it: from the checkout, installed, from any folder, twice, and in several processes."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from powernorm_fairseq import __version__
from powernorm_fairseq.norms.kernels import native
from tests.commands import PLUGIN, ROOT, checked, in_fresh_process

pytest.importorskip("fairseq")
pytestmark = pytest.mark.slow

# Importing fairseq takes seconds, so one process imports it without the plugin and forks for each case.
DRIVER = """
import json, os, sys
from fairseq import models, options, utils


def load(case):
    os.chdir(case["cwd"])
    sys.path[:0] = case.get("path", [])
    if "site" in case:  # as if fairseq were installed there: it looks for the plugin beside itself
        utils.__file__ = os.path.join(case["site"], "fairseq", "utils.py")
    if case.get("imported_before"):
        import powernorm_fairseq
    sys.argv = ["fairseq-train", "--user-dir", case["user_dir"]]
    for _ in range(case.get("times", 1)):
        options.get_training_parser()
    import powernorm_fairseq
    assert "transformer_pn" in models.MODEL_REGISTRY and "transformer_pn" in models.ARCH_MODEL_REGISTRY
    return os.path.realpath(powernorm_fairseq.__file__)


results = {}
for name, case in json.load(sys.stdin).items():
    end, start = os.pipe()
    if os.fork() == 0:
        try:
            answer = load(case)
        except BaseException as error:
            answer = type(error).__name__ + ": " + str(error)
        os.write(start, answer.encode())
        os._exit(0)
    os.close(start)
    with os.fdopen(end) as reader:
        results[name] = reader.read()
    os.wait()
print(json.dumps(results))
"""


@pytest.fixture
def source(tmp_path) -> Path:
    return copy_of_sources(tmp_path / "source")


def copy_of_sources(folder: Path) -> Path:
    """What an install needs, and none of the libraries that may lie in the checkout."""
    shutil.copytree(PLUGIN, folder / PLUGIN.name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def pip(*args, **variables) -> str:
    """What pip prints; from ``variables`` setup.py learns of compilers and of libraries that need not be compiled."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, args)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180, env={**os.environ, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


BUILT = {"POWERNORM_KERNELS": str(native.LIBRARY.parent)}  # to build them takes half a minute
NO_COMPILER = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++", "POWERNORM_KERNELS": ""}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder into which the project is installed regularly, without what it requires."""
    folder = tmp_path_factory.mktemp("installed")
    source = copy_of_sources(tmp_path_factory.mktemp("source") / "source")
    pip("install", "--quiet", "--no-deps", "--no-build-isolation", "--target", folder, source, **BUILT)
    (folder / "fairseq").mkdir()
    return folder


@pytest.fixture(scope="module")
def found(installed, tmp_path_factory) -> dict:
    """Case -> file of the package that was imported, or the error."""
    elsewhere = str(tmp_path_factory.mktemp("elsewhere"))
    name, checkout, place = PLUGIN.name, str(PLUGIN), str(installed / PLUGIN.name)
    nothing = str(tmp_path_factory.mktemp("nothing"))
    cases = {
        "checkout": dict(cwd=str(ROOT), user_dir=name),
        "checkout by path": dict(cwd=elsewhere, user_dir=checkout),
        "installed by path": dict(cwd=elsewhere, user_dir=place),
        "installed": dict(cwd=elsewhere, user_dir=name, site=str(installed), path=[str(installed)]),
        "installed, imported before": dict(
            cwd=elsewhere, user_dir=name, site=str(installed), path=[str(installed)], imported_before=True
        ),
        "checkout, installed imported before": dict(
            cwd=elsewhere, user_dir=checkout, path=[str(installed)], imported_before=True
        ),
        "twice": dict(cwd=elsewhere, user_dir=checkout, times=2),
        "editable": dict(cwd=elsewhere, user_dir=name, site=nothing, path=[str(ROOT)]),
        "editable by path": dict(cwd=elsewhere, user_dir=checkout, site=nothing, path=[str(ROOT)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=elsewhere,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def package_files(folder: Path) -> set:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"  # built or not in a checkout
    }


def test_every_file_of_the_package_is_installed(installed):
    assert package_files(installed / PLUGIN.name) == package_files(PLUGIN)


def wheel_of(source: Path, **variables) -> tuple:
    """The wheel's name, the libraries in it, and what its build printed."""
    printed = pip("wheel", "-v", "--no-deps", "--no-build-isolation", "--wheel-dir", source.parent, source, **variables)
    (wheel,) = source.parent.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        return wheel.name, {Path(name).name for name in file.namelist() if name.endswith(".so")}, printed


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="the CPU kernels are not built")
def test_a_wheel_has_the_kernels(source):
    name, libraries, _ = wheel_of(source, **BUILT)
    bound = {path.name for path in native.LIBRARY.parent.glob(f"{native.BINDING}.*")}
    assert libraries == {native.NAME, *bound}
    # With the binding it fits one Python; the library alone fits all.
    python = "cp{}{}".format(*sys.version_info) if bound else "py3"
    assert name.startswith(f"powernorm_fairseq-{__version__}-{python}-") and not name.endswith("-any.whl")


def test_without_a_compiler_all_but_the_kernels_is_installed_and_one_line_says_so(source, tmp_path):
    name, libraries, printed = wheel_of(source, **NO_COMPILER)
    assert libraries == set() and name.startswith(f"powernorm_fairseq-{__version__}-py3-none-")
    said = [line for line in printed.splitlines() if "powernorm_fairseq: the fused CPU kernels are left out" in line]
    assert len(said) == 1 and "no C++ compiler" in said[0] and "plain PyTorch" in said[0]

    site = tmp_path / "site"
    pip("install", "--quiet", "--no-deps", "--target", site, tmp_path / name)
    with open(site / PLUGIN.name / "norms" / "kernels" / "csrc" / "native.h", "a") as header:
        header.write("// else it would take the libraries of this environment, which are built of the same sources\n")
    program = (
        "import torch, powernorm_fairseq.norms as norms; x = torch.randn(5, 4, requires_grad=True);"
        "norms.create_norm('power', 4)(x).sum().backward(); print(norms.__file__, norms.kernels.available('native'))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True, text=True, timeout=120, cwd=str(tmp_path),
        env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip
    assert done.stdout.split() == [str(site / PLUGIN.name / "norms" / "__init__.py"), "None"], done.stderr
    assert done.stderr.count("the norms' fused CPU kernels were not built") == 1


@pytest.mark.parametrize("case", ["checkout", "checkout by path", "twice", "editable by path"])
def test_the_checkout(found, case):
    assert found[case] == str(PLUGIN / "__init__.py")


@pytest.mark.parametrize(
    "case", ["installed", "installed by path", "installed, imported before", "checkout, installed imported before"]
)
def test_installed(found, installed, case):
    """The first import counts; another copy at the path is named in a warning (tests/test_compat.py)."""
    assert found[case] == str((installed / PLUGIN.name / "__init__.py").resolve())


def test_n13_an_editable_install_needs_the_path(found):
    """fairseq looks for the name in the working folder and beside itself; docs/compatibility.md says so."""
    assert found["editable"].startswith("FileNotFoundError")


SPAWN = """
import sys
import torch
from fairseq import options, utils


def worker(rank, args):
    utils.import_user_module(args)  # as fairseq_cli.train.main does first in each worker
    from fairseq.models import MODEL_REGISTRY
    with open("worker" + str(rank), "w") as answer:
        answer.write(str("transformer_pn" in MODEL_REGISTRY))


if __name__ == "__main__":
    args, _ = options.get_training_parser().parse_known_args()
    torch.multiprocessing.spawn(worker, args=(args,), nprocs=2)
"""


def test_spawned_workers_in_another_folder(tmp_path):
    """Each spawned worker imports the plugin anew, by what --user-dir says relative to the working folder."""
    (tmp_path / "checkout").symlink_to(ROOT)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "spawn.py").write_text(SPAWN)
    done = subprocess.run(
        [sys.executable, tmp_path / "spawn.py", "DATA", "--user-dir", "../checkout/powernorm_fairseq"],
        cwd=tmp_path / "elsewhere",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert [(tmp_path / "elsewhere" / name).read_text() for name in ("worker0", "worker1")] == ["True", "True"]


def test_installed_in_this_environment(tmp_path):
    """After `make venv`: the console command and fairseq's own find the plugin by name from any folder."""
    if not (Path(sys.executable).parent / "powernorm_fairseq").exists():
        pytest.skip("the project is not installed in this environment")
    assert checked("powernorm_fairseq", "--version", cwd=tmp_path).split()[-1] == __version__
    refused = in_fresh_process(
        "fairseq-train", "DATA", "--user-dir", "powernorm_fairseq", "--arch", "nothing", cwd=tmp_path
    )
    assert "'transformer_pn'" in refused.stdout  # among the architectures to choose from
