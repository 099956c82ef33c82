"""Runs fairseq-train many times, with one or several workers, for the price of one import.

``python -m tests.forked PLAN`` does what the file PLAN, a list in JSON, says. Each entry has ``args``, the command
line, and what :func:`train_in_children` takes. Command lines are parsed here, equal ones in a row once, since that
takes longer than to train a tiny model. Each worker is a child of a process that has imported fairseq but has run no
backward pass, since autograd's threads do not survive a fork. Workers find each other as under torchrun, but nobody
ends the others when one fails.
"""

import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from tests.commands import in_a_group

SECONDS_PER_RUN = 100


def run_plan(plan: Sequence[Dict[str, Any]], folder: Path, timeout: float = 300) -> List[List[int]]:
    """Carries out a plan in a fresh process; whatever is left of it is killed at the end.

    Returns:
        The exit codes of each entry's workers; negative where a signal ended one.
    """
    (folder / "plan.json").write_text(json.dumps(plan, default=str))
    in_a_group([sys.executable, "-m", "tests.forked", folder / "plan.json"], timeout)
    return json.loads((folder / "plan.json.codes").read_text())


def train_in_children(
    cfg: Any,
    log: str,
    changes: Optional[Dict[str, Any]] = None,
    workers: int = 1,
    hook: Optional[str] = None,
    expect: Optional[int] = 0,
) -> List[int]:
    """What fairseq-train does once it has parsed its command line, in one child per worker.

    Args:
        cfg: the parsed command line.
        log: file for the output; several workers write to ``log.0``, ``log.1``, ...
        changes: values of the config in place of those of the command line, such as ``checkpoint.save_dir``.
        hook: ``module:function`` to be called in each child before training.
        expect: the exit code of all workers, negative for a signal; anything else ends the plan with the end of their
            output; None: any.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children, logs = [], [log if workers == 1 else f"{log}.{rank}" for rank in range(workers)]
    for rank in range(workers):
        child = os.fork()
        if child == 0:
            if workers > 1:
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(workers))
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            _train(cfg, changes or {}, logs[rank], hook)
        children.append(child)
    codes = _wait(children)
    if expect is not None and codes != [expect] * workers:
        ends = "\n".join(Path(name).read_text()[-4000:] for name in logs)
        raise SystemExit(f"ended with {codes} instead of {expect}: {log}\n{ends}")
    return codes


def _train(cfg: Any, changes: Dict[str, Any], log: str, hook: Optional[str]) -> None:
    """A child's life."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        from fairseq.distributed import utils
        from fairseq_cli import train
        from omegaconf import OmegaConf

        if hook is not None:
            module, function = hook.split(":")
            getattr(importlib.import_module(module), function)()
        for key, value in changes.items():
            assert OmegaConf.select(cfg, key.rpartition(".")[0]) is not None, key
            OmegaConf.update(cfg, key, value, merge=False)
        utils.call_main(cfg, train.main)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(children: List[int]) -> List[int]:
    deadline = time.monotonic() + SECONDS_PER_RUN
    codes: Dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child in codes:
                continue
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[child] for child in children]


def main(path: Path) -> None:
    import fairseq_cli.train  # noqa: F401
    import torch
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    import powernorm_fairseq  # noqa: F401

    torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])  # torch 2 imports much of itself with the first optimiser
    parsed: List[object] = []
    codes = []
    for entry in json.loads(path.read_text(encoding="utf-8")):
        args = list(map(str, entry.pop("args")))
        if args != parsed:
            sys.argv = ["fairseq-train", *args]
            cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser()))
            parsed = args
        codes.append(train_in_children(cfg, **entry))
    Path(f"{path}.codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
