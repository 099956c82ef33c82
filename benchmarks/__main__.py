"""All families, one after the other, then tables and figures: ``python -m benchmarks [--full] [--only step,norms]``."""

import subprocess
import sys
import time
from typing import List, Optional, Sequence

from benchmarks import records, tables


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs each family in a process of its own; one that fails does not keep the others from being measured."""
    parser = records.parser(__doc__ or "")
    parser.add_argument("--only", default="", help="families, separated by commas; all others are left out")
    args = parser.parse_args(argv)
    chosen = args.only.split(",") if args.only else list(records.FAMILIES)
    unknown = sorted(set(chosen) - set(records.FAMILIES))
    if unknown:
        parser.error(f"there is no family {', '.join(unknown)}; there are {', '.join(records.FAMILIES)}")
    failed: List[str] = []
    begin = time.perf_counter()
    for family in chosen:
        command = [sys.executable, "-m", f"benchmarks.{family}", "--output", str(args.output)]
        print(f"== {family}", flush=True)
        started = time.perf_counter()
        if subprocess.run([*command, *(["--full"] if args.full else [])]).returncode != 0:
            failed.append(family)
        print(f"== {family}: {time.perf_counter() - started:.0f} s", flush=True)
    tables.main(["--output", str(args.output)])
    print(f"{time.perf_counter() - begin:.0f} s in all")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept, and `python -m benchmarks.tables` makes tables of it")
        sys.exit(130)
