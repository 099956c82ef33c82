"""What importing the plugin adds to importing fairseq, in fresh processes.

python -m benchmarks.startup [--full]
"""

import json
import subprocess
import sys
from typing import Any, Dict, List, Optional, Sequence

from benchmarks import records, targets, timing

LIMIT = 0.3  # seconds

# fairseq-train's own imports come first; what the plugin does after them is its own.
PROGRAM = """
import json, sys, time
start = time.perf_counter()
import fairseq_cli.train, fairseq.models
fairseq_done = time.perf_counter()
before = set(sys.modules)
import powernorm_fairseq
done = time.perf_counter()
try:
    maps = open("/proc/self/maps").read()
except OSError:
    maps = ""
new = set(sys.modules) - before
loaded = [name for name in ("triton", "powernorm_fairseq.norms.kernels.native", "powernorm_fairseq.norms.kernels.gpu")
          if name in new] + (["_native.so"] if "_native.so" in maps else [])
print("RESULT" + json.dumps([fairseq_done - start, done - fairseq_done, loaded]))
"""


def once() -> List[Any]:
    """Seconds of fairseq's imports, seconds of the plugin's, and which kernels that has loaded."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True)
    return json.loads(done.stdout.rpartition("RESULT")[2])


def measure(processes: int) -> Dict[str, Any]:
    """The record of so many fresh processes; the first is left out, since it may have to read from the disk."""
    times = [once() for _ in range(processes + 1)][1:]
    adds = timing.spread([one[1] for one in times])
    loaded = sorted({name for one in times for name in one[2]})
    return {
        "family": "startup",
        "what": "import powernorm_fairseq after fairseq",
        "seconds": timing.spread([one[0] for one in times]),
        "adds": adds,
        "rounds": processes,
        "loaded": loaded,
        "targets": [targets.target("seconds", LIMIT, adds["median"]), targets.target("kernels loaded", 0, len(loaded))],
    }


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Measures and stores the record."""
    args = records.parser("What importing the plugin adds to importing fairseq.").parse_args(argv)
    run = records.Run("startup", args.output)
    run.add([{**measure(15 if args.full else 7), "circumstances": records.circumstances(1)}])
    run.finish()
    return 0


if __name__ == "__main__":
    records.start_again("benchmarks.startup")
    sys.exit(main())
