"""With how many workers a training starts, what that makes of its config, and the command line that starts them.

One worker is plain fairseq-train. Several are started by torchrun, each as ``powernorm_fairseq/experiment/worker.py``,
which tells fairseq its rank and refuses to train in a group of another size than was meant.
"""

import argparse
import math
import os
import re
import sys
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from powernorm_fairseq.experiment.config import Config, number, override, train_arguments
from powernorm_fairseq.processes import PACKAGE, UserError, fairseq_program

PORT = 29511
# How long a node waits for the others, in seconds: the first one prepares data and scores while they wait.
WAIT = 24 * 3600


@dataclass(frozen=True)
class Launch:
    """Where the workers of a run are.

    Attributes:
        local: workers on each node: one for each GPU, or processes where there is none.
        nodes: machines.
        node: the number of this one, from 0; node 0 does all that is not training.
        address: host name of node 0.
        port: on node 0.
    """

    local: int = 1
    nodes: int = 1
    node: int = 0
    address: str = ""
    port: int = PORT

    @property
    def workers(self) -> int:
        """All workers."""
        return self.local * self.nodes

    def described(self) -> str:
        """In words."""
        on_nodes = f" ({self.nodes} nodes of {self.local})" if self.nodes > 1 else ""
        return f"{self.workers} worker{'s' if self.workers > 1 else ''}{on_nodes}"


ONE = Launch()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that ``launch_of`` reads."""
    parser.add_argument(
        "--gpus",
        type=int,
        help="GPUs of each node; on the CPU (common.cpu) that many processes "
        "(the config's number, or what this machine has if that is less)",
    )
    parser.add_argument("--nodes", type=int, help="machines (1, or what SLURM says)")
    parser.add_argument("--node-rank", type=int, help="the number of this machine, from 0 (what SLURM says)")
    parser.add_argument(
        "--rendezvous", metavar="HOST[:PORT]", help=f"the machine of number 0 (what SLURM says; port {PORT})"
    )


def launch_of(
    args: argparse.Namespace, config: Config, environment: Mapping[str, str] = os.environ, anywhere: bool = False
) -> Launch:
    """What the arguments ask for; in a step of several SLURM tasks (srun), one for each node, SLURM's numbers.

    ``anywhere``: only to be printed, so GPUs need not be here.

    Raises:
        UserError: numbers that cannot be, GPUs that are not there, or several nodes without their meeting point.
    """
    cpu = bool(config.get("common", {}).get("cpu"))
    nodes, node, address = _nodes(args, environment)
    planned = int(number(config, "distributed_training", "distributed_world_size", 1))
    if args.gpus is not None and args.gpus < 1:
        raise UserError(f"--gpus {args.gpus}: it takes one at least")
    here = 0 if cpu else _gpus()
    if cpu or (anywhere and here == 0):
        local = args.gpus or max(1, planned // nodes)
    else:
        if here == 0:
            raise UserError(
                "no GPU here, and the config is for GPUs; --set common.cpu=true takes processors, which is very slow"
            )
        local = args.gpus or min(here, max(1, planned // nodes))
        if local > here and not anywhere:
            raise UserError(f"--gpus {local}, but this machine has {here}")
    host, _, port = address.partition(":")
    if port and not port.isdigit():
        raise UserError(f"--rendezvous {address!r} is not HOST or HOST:PORT")
    return Launch(local, nodes, node, host, int(port or environment.get("MASTER_PORT") or PORT))


def _nodes(args: argparse.Namespace, environment: Mapping[str, str]) -> Tuple[int, int, str]:
    """Number of nodes, this one's number, address of the first."""
    nodes, node, address = args.nodes, args.node_rank, args.rendezvous
    if nodes is None and int(environment.get("SLURM_STEP_NUM_NODES", 1)) > 1:
        nodes = int(environment["SLURM_STEP_NUM_NODES"])
        if int(environment.get("SLURM_STEP_NUM_TASKS", nodes)) != nodes:
            raise UserError("srun started several tasks on a node; one is enough, it starts the workers of its GPUs")
    nodes = 1 if nodes is None else nodes
    if nodes < 1:
        raise UserError(f"--nodes {nodes}: it takes one at least")
    if nodes == 1:
        if node or address:
            raise UserError("--node-rank and --rendezvous are for several --nodes")
        return 1, 0, ""
    if node is None:
        node = int(environment["SLURM_NODEID"]) if "SLURM_NODEID" in environment else None
    if address is None:
        address = environment.get("MASTER_ADDR") or _first_host(environment)
    if node is None or not address:
        raise UserError("several nodes need --node-rank and --rendezvous on each, where SLURM does not say them")
    if not 0 <= node < nodes:
        raise UserError(f"--node-rank {node} of {nodes} nodes; the first is 0")
    return nodes, node, address


def _first_host(environment: Mapping[str, str]) -> Optional[str]:
    """The first name of SLURM's list of nodes, such as ``gpu[01-04],x`` (gpu01)."""
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not listed:
        return None
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", listed)
    return match.group(1) + (match.group(2) or "") if match else None


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def adapted(config: Config, launch: Launch) -> Tuple[Config, List[str]]:
    """The config for that many workers, and what was changed, in words.

    An update stays over as many tokens (or samples) as the config says with its own number of workers: size of a batch
    x ``update_freq`` x ``distributed_world_size``. Fewer workers take more batches for an update. Workers that find no
    whole batch for each take smaller ones, which the words say, since batch statistics see less then.

    Raises:
        UserError: that number of workers does not divide the product, or the config has no fixed size of a batch.
    """
    planned = int(number(config, "distributed_training", "distributed_world_size", 1))
    batches = int(number(config, "optimization", "update_freq", 1)) * planned
    if "distributed_world_size" not in config.get("distributed_training", {}):
        # fairseq's own default is as many workers as there are GPUs.
        config = override(config, [f"distributed_training.distributed_world_size={planned}"])
    frequencies = config.get("optimization", {}).get("update_freq", 1)
    if launch.workers != planned and isinstance(frequencies, (list, tuple)) and len(frequencies) > 1:
        raise UserError(f"update_freq changes from epoch to epoch; the config is for {planned} workers and no others")
    name = next((name for name in ("max_tokens", "batch_size") if config.get("dataset", {}).get(name)), None)
    if name is None:
        raise UserError("the config has neither dataset.max_tokens nor dataset.batch_size")
    size, unit = int(config["dataset"][name]), {"max_tokens": "tokens", "batch_size": "samples"}[name]
    shared = math.gcd(batches, launch.workers)
    parts = launch.workers // shared
    if size % parts:
        fitting = [str(count) for count in range(1, batches * size + 1) if _fits(batches, size, count)][:24]
        raise UserError(
            f"an update of {size} {unit} x {batches} cannot be shared by {launch.workers} workers; "
            f"these numbers can: {', '.join(fitting)}, ..."
        )
    frequency = batches // shared
    changes = [
        f"distributed_training.distributed_world_size={launch.workers}",
        f"optimization.update_freq=[{frequency}]",
        f"dataset.{name}={size // parts}",
    ]
    changed = override(config, [] if launch.workers == planned else changes)
    words = [
        f"an update is over {size * batches} {unit}: {size // parts} x {frequency} (update_freq) x {launch.described()}"
    ]
    if parts > 1:
        words.append(
            f"{name} is {size // parts} instead of {size}, so that {launch.workers} workers share an update; batch "
            "statistics (batch, power_v, and power in its warm-up) see smaller batches than published"
            + ("; fairseq leaves out sentences that are longer than a batch" if name == "max_tokens" else "")
        )
    return changed, words


def _fits(batches: int, size: int, workers: int) -> bool:
    return size % (workers // math.gcd(batches, workers)) == 0


def command(config: Config, launch: Launch) -> List[str]:
    """The command line that starts this node's part of a training.

    Raises:
        UserError: the config is for another number of workers.
    """
    planned = int(number(config, "distributed_training", "distributed_world_size", 1))
    if planned != launch.workers:
        raise UserError(f"the config is for {planned} workers, and {launch.workers} would be started")
    arguments = train_arguments(config)
    if launch.workers == 1:
        return [*fairseq_program("train"), *arguments]
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={launch.local}"]
    if launch.nodes == 1:
        start += ["--standalone"]
    else:
        start += [f"--nnodes={launch.nodes}", f"--node_rank={launch.node}", f"--rdzv_conf=timeout={WAIT}"]
        start += [f"--master_addr={launch.address}", f"--master_port={launch.port}"]
    return [*start, str(PACKAGE / "experiment" / "worker.py"), str(launch.workers), *arguments]


def record_of(launch: Launch) -> Dict[str, Any]:
    """What a result says about it."""
    return {"workers": launch.workers, "nodes": launch.nodes}


# What fairseq takes for the start of several workers, and torchrun and SLURM leave in the environment of a job; here
# everything that counts is on the command line.
LAUNCHERS = ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"]
LAUNCHERS += ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"]
