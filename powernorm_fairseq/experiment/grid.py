"""Rows by norms and seeds as a Hydra application, so that Hydra's launchers and sweepers can be used.

``python -m powernorm_fairseq.experiment.grid --multirun group=mt/iwslt14_de_en norm=layer,power seed=1,2,3`` does for
each combination what ``powernorm_fairseq reproduce`` does for one: a folder and a record each, nothing done twice.
"""

import argparse
import inspect
import os
import sys
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from powernorm_fairseq.experiment import reproduce
from powernorm_fairseq.processes import UserError


@dataclass
class Grid:
    """One point of the grid.

    Attributes:
        group: the table, such as ``mt/iwslt14_de_en``.
        norm: the row in it.
        seed: of the run.
        gpus, threads, runs, records, configs, raw: as for ``powernorm_fairseq reproduce``; null: its default.
        set: other values than the config's, ``'set=["group.option=value"]'`` in a shell, with both quotes.
    """

    group: str = MISSING
    norm: str = "layer"
    seed: int = 1
    gpus: Optional[int] = None
    threads: Optional[int] = None
    runs: Optional[str] = None
    records: Optional[str] = None
    configs: Optional[str] = None
    raw: Optional[str] = None
    set: List[str] = field(default_factory=list)


# Hydra keeps its own files (what was asked for, a log of each job) here, and not where the runs are.
PLACES = {"hydra.run.dir": "runs/grid/single", "hydra.sweep.dir": "runs/grid", "hydra.output_subdir": "null"}


def command_line(point: Dict[str, Any]) -> List[str]:
    """What ``powernorm_fairseq reproduce`` would be started with."""
    line = [f"{point['group']}/{point['norm']}", "--seeds", str(point["seed"])]
    for name in ("gpus", "threads", "runs", "records", "configs", "raw"):
        if point[name] is not None:
            line += [f"--{name}", str(point[name])]
    return [*line, "--set", *point["set"]] if point["set"] else line


def run_point(cfg: Any) -> Optional[float]:
    """One run; returns its last validation loss for sweepers that minimise something, infinity if it diverged."""
    os.chdir(hydra.utils.get_original_cwd())
    parser = argparse.ArgumentParser()
    reproduce.add_arguments(parser)
    args = parser.parse_args(command_line(dict(OmegaConf.to_container(cfg))))  # type: ignore[arg-type]
    try:
        results = reproduce.reproduce(args)
    except UserError as error:
        # Where Hydra goes on with the other combinations it shows the first error of them all, at the end.
        sys.stderr.write(f"{args.row}, seed {args.seeds[0]}: {error}\n")
        raise
    if not results:
        return None
    loss = results[0]["training"]["valid_loss"]
    return float("inf") if loss is None else float(loss)


def main() -> None:
    """The application."""
    ConfigStore.instance().store(name="grid", node=Grid)
    said = [word.partition("=")[0] for word in sys.argv[1:]]
    sys.argv += [f"{name}={value}" for name, value in PLACES.items() if name not in said]
    # Hydra 1.0 knows no versions of its behaviour; later ones want to be told which is meant.
    version = {"version_base": None} if "version_base" in inspect.signature(hydra.main).parameters else {}
    hydra.main(config_path=None, config_name="grid", **version)(run_point)()


if __name__ == "__main__":
    main()
