"""One worker of a training that torchrun started: ``python .../experiment/worker.py WORKERS ARGUMENTS``.

``ARGUMENTS`` are those of fairseq-train. fairseq guesses rank and size of the group from its surroundings, and some
distributions guess wrong without a GPU or train a model for each worker; so they are said here, and checked where the
group is there.
"""

import os
import sys
from typing import Any, Callable, List, Mapping

if not __package__:
    # Started as a file, since with `-m` Python looks into the current folder first, which may be a checkout of another
    # state than the package that starts this. The file's own folder is no place to import from.
    sys.path.pop(0)

from powernorm_fairseq.processes import end_with_parent


def arguments_of(worker: Mapping[str, str], workers: int, arguments: List[str]) -> List[str]:
    """fairseq-train's arguments for one worker.

    Args:
        worker: torchrun's variables.
        workers: how many there should be.

    Raises:
        SystemExit: torchrun started another number.
    """
    started = int(worker.get("WORLD_SIZE", 1))
    if started != workers:
        raise SystemExit(
            f"this training is meant for {workers} workers, and {started} were started; nothing is trained"
        )
    backend = "gloo" if "--cpu" in arguments else "nccl"
    said = {
        "--distributed-rank": worker["RANK"],
        "--device-id": worker["LOCAL_RANK"],
        "--distributed-world-size": workers,
        "--distributed-backend": backend,
        "--distributed-init-method": "env://",
    }
    return [*arguments, *(str(part) for pair in said.items() for part in pair), "--distributed-no-spawn"]


def checked(train: Callable[..., Any], workers: int) -> Callable[..., Any]:
    """``train``, called only in a group of that many workers.

    Raises:
        SystemExit: fairseq has made another group, or none.
    """

    def train_in_group(*args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        size = dist.get_world_size() if dist.is_initialized() else 1
        if size != workers:
            raise SystemExit(
                f"this worker sees {size} workers, and {workers} were started: they would train {workers // size} "
                "models into one folder; nothing is trained"
            )
        return train(*args, **kwargs)

    return train_in_group


def main() -> None:
    """Train as one of several."""
    end_with_parent()
    workers = int(sys.argv[1])
    sys.argv = ["fairseq-train", *arguments_of(os.environ, workers, sys.argv[2:])]
    from fairseq_cli import train

    train.main = checked(train.main, workers)
    train.cli_main()


if __name__ == "__main__":
    main()
