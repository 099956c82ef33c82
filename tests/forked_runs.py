"""Runs fairseq-train many times for the price of one import: each run in a child of a process that has imported it.

``python -m tests.forked_runs PLAN`` does what the JSON file PLAN says, a list of objects with

* ``args``: the command line of these runs. It is parsed once, since that takes longer than to train a tiny model.
* ``runs``: a list of objects with
    * ``changes``: values of the config in place of those from the command line, such as ``checkpoint.save_dir``,
    * ``log``: the file for the run's output,
    * ``kill``: null, or the number of finished updates after which the run kills itself inside the next one, when all
      gradients and statistics are gathered and nothing of them is in the parameters yet.

The process that imports and parses runs no backward pass, since autograd's threads do not survive a fork.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Dict, Optional

SECONDS_PER_RUN = 60


def train(cfg: Any, changes: Dict[str, Any], log: str, kill: Optional[int]) -> None:
    """The child's part: what fairseq-train does once it has parsed its command line."""
    signal.alarm(SECONDS_PER_RUN)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    from fairseq.distributed import utils
    from fairseq.trainer import Trainer
    from fairseq_cli import train
    from omegaconf import OmegaConf

    if kill is not None:
        clip_grad_norm = Trainer.clip_grad_norm

        def killed(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.get_num_updates() == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            return clip_grad_norm(self, *args, **kwargs)

        Trainer.clip_grad_norm = killed
    for key, value in changes.items():
        assert OmegaConf.select(cfg, key.rpartition(".")[0]) is not None, key
        OmegaConf.update(cfg, key, value, merge=False)
    utils.call_main(cfg, train.main)


def run(cfg: Any, entry: Dict[str, Any]) -> int:
    """Does one run in a child and waits for it; the code is negative if a signal ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(cfg, **entry)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def main(path: Path) -> int:
    import fairseq_cli.train  # noqa: F401
    import torch
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    import powernorm_fairseq  # noqa: F401

    torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])  # torch 2 imports much of itself with the first optimiser
    plan = json.loads(path.read_text(encoding="utf-8"))
    for group in plan:
        sys.argv = ["fairseq-train", *group["args"]]
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser()))
        for entry in group["runs"]:
            code = run(cfg, entry)
            wanted = 0 if entry["kill"] is None else -signal.SIGKILL
            if code != wanted:
                print(f"ended with {code} instead of {wanted}: {entry}\n{Path(entry['log']).read_text()[-5000:]}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
