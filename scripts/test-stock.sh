#!/usr/bin/env bash
# Runs the tests with upstream's last release, fairseq 0.12.2, which needs Python 3.8 to 3.10 (1.9 GB of disk each).
#
#   scripts/test-stock.sh [PYTEST ARGUMENTS]           with the first of Python 3.8, 3.10 that is found
#   PYTHON=/path/to/python3.10 scripts/test-stock.sh   with that one
set -euo pipefail
cd "$(dirname "$0")/.."

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

find_python() {
  local wanted candidate
  for wanted in 3.8 3.10; do
    for candidate in "python$wanted" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$wanted".*/bin/python; do
      if [ "$(version "$candidate")" = "$wanted" ]; then
        echo "$candidate"
        return
      fi
    done
  done
}

python=${PYTHON:-$(find_python)}
case $(version "${python:-none}") in
  3.8 | 3.10) ;;
  "") echo "test-stock: found no Python 3.8 or 3.10, so nothing was tested; give one as PYTHON=..." >&2; exit 1 ;;
  *) echo "test-stock: fairseq 0.12.2 is tested with Python 3.8 or 3.10, not with $python" >&2; exit 1 ;;
esac

venv=.venv-stock/$(version "$python")
PYTHON=$python scripts/setup-venv.sh "$venv"
"$venv/bin/python" -c '
import fairseq, sys, torch
print("stock: Python", sys.version.split()[0], "fairseq", fairseq.__version__, "torch", torch.__version__)
' 2>/dev/null
OMP_NUM_THREADS=1 exec "$venv/bin/python" -m pytest -n "${WORKERS:-2}" --dist worksteal "$@"
