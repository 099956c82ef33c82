#!/usr/bin/env bash
# Makes a virtual environment with this project and what it needs; does nothing when all is there already.
#
#   scripts/setup-venv.sh [FOLDER]        default .venv
#   PYTHON=python3.10 scripts/setup-venv.sh .venv310
#
# The project is installed regularly, not editable: fairseq does not find an editable install from other folders.
# What is installed is recorded in FOLDER/.installed-* when a step is whole; an interrupted set-up is begun anew.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH=2.13.0
CPU_WHEELS=https://download.pytorch.org/whl/cpu
venv=${1:-.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac

say() { echo "setup-venv: $*" >&2; }
fail() { say "$@"; exit 1; }
checksum() { find "$@" -type f ! -name '*.pyc' ! -name '*.so' -exec cksum {} + | LC_ALL=C sort | cksum; }

minor() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.8 or later."
    python=$PYTHON
    return
  fi
  for python in python3.11 python3.12 python3 python3.10 python3.9 python3.8 python; do
    if usable "$python"; then return; fi
  done
  fail "found no Python 3.8 or later. Install one (Debian, Ubuntu: apt-get install python3 python3-venv), or give" \
    "its path: PYTHON=/path/to/python3.11 make venv"
}

create() {
  if [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
    fail "$venv is no virtual environment; nothing in it was changed"
  fi
  find_python
  say "creating ${venv#"$PWD/"} with $("$python" --version 2>&1) ($(command -v "$python"))"
  rm -rf "$venv"
  if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    "$python" -m venv "$venv"
  elif "$python" -c 'import venv, pip; assert int(pip.__version__.split(".")[0]) >= 23' 2>/dev/null; then
    # Debian keeps ensurepip in a package of its own (python3-venv); its pip can install another one into the folder.
    "$python" -m venv --without-pip "$venv"
    "$python" -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check "pip>=23"
  elif "$python" -c 'import virtualenv' 2>/dev/null; then
    "$python" -m virtualenv --quiet "$venv"
  else
    fail "$python cannot make virtual environments. Debian and Ubuntu: apt-get install python$(minor "$python")-venv" \
      "(or: pip install virtualenv)"
  fi
}

pip_install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

gpu_driver() { [ -e /proc/driver/nvidia ] || command -v nvidia-smi >/dev/null; }

# A CUDA build of torch is 5 GB that a machine without a GPU never uses. Where the CPU build lies depends on how pip
# is set up. For Python before 3.11 setup.py asks for the older torch that fairseq 0.12.2 needs.
install_torch() {
  case $(minor "$venv/bin/python") in 3.8 | 3.9 | 3.10) return ;; esac
  if [ "$(uname -s)" != Linux ] || gpu_driver; then
    say "installing torch $TORCH"
    pip_install "torch==$TORCH"
    return
  fi
  say "installing torch $TORCH for the CPU (no GPU driver found)"
  pip_install "torch==$TORCH+cpu" 2>/dev/null ||
    pip_install "torch==$TORCH+cpu" --extra-index-url "$CPU_WHEELS" 2>/dev/null || {
    say "no CPU build of torch $TORCH can be had; installing the ordinary one, which may take 5 GB"
    pip_install "torch==$TORCH"
  }
}

wanted_python() { [ -z "${PYTHON:-}" ] || [ "$(minor "$PYTHON")" = "$(minor "$venv/bin/python")" ]; }
# pip comes last into a new environment. The scripts in bin/ name the folder, so a moved environment is made anew.
whole() {
  [ ! -e "$venv/.interrupted" ] && usable "$venv/bin/python" && wanted_python &&
    head -n 3 "$venv/bin/pip" 2>/dev/null | grep -qF "$venv/bin/"
}
installed() { [ "$(cat "$venv/.installed-$1" 2>/dev/null)" = "$2" ]; }

requirements="$(checksum setup.py pyproject.toml) torch $TORCH"
sources=$(checksum powernorm_fairseq)
kernels=powernorm_fairseq/norms/kernels
if whole && installed requirements "$requirements" && installed sources "$sources"; then
  exit 0
fi

kernel_folder() {
  (cd / && "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))') | sed "s|$|/$kernels|"
}
# What the compiled kernels are made of; the binding among them fits one version of torch.
kernel_sources() {
  checksum setup.py $kernels/csrc
  "$venv/bin/python" -c 'from importlib.metadata import version; print("torch", version("torch"))'
}
note_kernels() {
  if [ -e "$(kernel_folder)/_native.so" ]; then
    kernel_sources >"$venv/.installed-kernels"
  else
    rm -f "$venv/.installed-kernels"
    say "the norms' CPU kernels could not be built (no C++ compiler? Debian, Ubuntu: apt-get install g++); norms" \
      "run in plain PyTorch, several times slower"
  fi
}

# One set-up at a time; a second waits and then finds everything in place.
if command -v flock >/dev/null; then
  exec 9>"${TMPDIR:-/tmp}/setup-venv-$(id -u)-$(echo "$venv" | cksum | cut -d ' ' -f 1).lock"
  flock 9
fi

# Built from a copy, so that no build folder with files of another day is left here and gets installed.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -R setup.py MANIFEST.in pyproject.toml README.md LICENSE powernorm_fairseq "$copy"
find "$copy" -name __pycache__ -prune -exec rm -rf {} +

if ! whole; then create; fi
if ! installed requirements "$requirements"; then
  rm -f "$venv/.installed-requirements" "$venv/.installed-sources"
  touch "$venv/.interrupted"
  # pip 24.1 and later refuse the metadata of what fairseq 0.12.2 depends on.
  case $(minor "$venv/bin/python") in 3.8 | 3.9 | 3.10) pip_install "pip<24.1" ;; esac
  install_torch
  say "installing fairseq and the other requirements (minutes)"
  pip_install "setuptools>=70.1"
  pip_install "$copy[dev]"
  note_kernels
  rm "$venv/.interrupted"
  echo "$requirements" >"$venv/.installed-requirements"
fi
if ! installed sources "$sources"; then
  say "installing powernorm_fairseq"
  rm -f "$venv/.installed-sources"
  # Compiling the kernels takes a minute or two, so libraries of sources that have not changed are used again.
  if installed kernels "$(kernel_sources)"; then
    mkdir "$copy/kept"
    find "$(kernel_folder)" -name '_*.so' -exec cp {} "$copy/kept" \;
    export POWERNORM_KERNELS=$copy/kept
  fi
  pip_install --no-deps --no-build-isolation --force-reinstall "$copy"
  note_kernels
  echo "$sources" >"$venv/.installed-sources"
fi
say "ready: ${venv#"$PWD/"}"
