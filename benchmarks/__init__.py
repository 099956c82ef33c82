"""How fast the norms are: what ``make bench`` measures, and what is made of it (docs/performance.md)."""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parent.parent)

# `python -m benchmarks...` looks into the current folder first, but the installed package is the one with kernels.
if sys.argv[0] == "-m" and sys.path and sys.path[0] in ("", _ROOT):
    sys.path.append(sys.path.pop(0) or _ROOT)
