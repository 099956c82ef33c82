"""Two workers (gloo) against one process that has all of their batches.

Both workers run all scenarios once and leave what they found in a file; the tests look at it.
"""

import copy
import os
import socket
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from powernorm_fairseq.norms import create_norm
from powernorm_fairseq.norms.sharing import SharedStatistics
from tests.norms.helpers import RUNNING, assert_same_state, close, running, step, tokens, with_parameters

WORKERS, UPDATES, CHANNELS = 2, 5, 6


@pytest.fixture(autouse=True)
def implementation():
    """Workers are processes of their own and run what norms always run; so does what they are compared with."""


SECONDS = 90
CASES = {
    "power": ("power", {}),
    "power_released": ("power", {"numerics": "released"}),
    "power_in_warm_up": ("power", {"warmup_updates": UPDATES}),
    "power_in_warm_up_released": ("power", {"warmup_updates": UPDATES + 1, "numerics": "released"}),
    "power_through_warm_up": ("power", {"warmup_updates": 2}),
    "power_v": ("power_v", {}),
    "batch": ("batch", {"groups": 2}),
    "batch_cumulative": ("batch", {"cumulative": True}),
}


def make(case, **more):
    name, options = CASES[case]
    norm = create_norm(name, CHANNELS, {**options, **more}).double()
    return with_parameters(norm, np.random.default_rng(3))


def batches(update, worker):
    """The micro-batches of one worker: x, dy, padding; of different sizes. The last of worker 1 is a dummy batch."""
    rng = np.random.default_rng([update, worker])
    found = []
    for number, rows in enumerate((7 + 4 * worker, 9 - worker)):
        x = torch.as_tensor(tokens(rng, rows, CHANNELS))
        dy = torch.as_tensor(tokens(rng, rows, CHANNELS, offset=0.1))
        padding = torch.as_tensor(rng.random(rows) < 0.3)
        if (worker, number) == (1, 1):
            dy = torch.zeros_like(dy)
        found.append((x, dy, padding))
    return found


def is_dummy(worker, number):
    return (worker, number) == (1, 1)


def train_shared(case, worker):
    """Statistics of batches stay each worker's own; the running ones are shared."""
    norm = make(case)
    shared = SharedStatistics(norm)
    gradients, states = [], []
    for update in range(UPDATES):
        norm.set_num_updates(update)
        gradients.append([step(norm, *batch)[1] for batch in batches(update, worker)])
        shared.reduce(absorb=False)
        norm.set_num_updates(update + 1)
        states.append(copy.deepcopy(norm.state_dict()))
    return {"dx": gradients, "states": states, "differences": shared.differences()}


def train_in_step(case, worker):
    """Statistics of batches are shared too."""
    norm = make(case, sync="batch")
    shared = SharedStatistics(norm)
    found = []
    for update in range(UPDATES):
        norm.set_num_updates(update)
        micro = []
        for number, batch in enumerate(batches(update, worker)):
            shared.workers.batch_counts = not is_dummy(worker, number)
            y, dx = step(norm, *batch)
            micro.append([y, dx] + [parameter.grad.clone() for parameter in norm.parameters()])
        shared.reduce()
        found.append(micro)
    return {"micro": found, "state": norm.state_dict(), "differences": shared.differences()}


class Layers(torch.nn.Module):
    """Two layers with a norm each; the second may be left out, and may recompute its forward pass."""

    def __init__(self, sync="running"):
        super().__init__()
        torch.manual_seed(1)
        self.one = torch.nn.Sequential(torch.nn.Linear(CHANNELS, CHANNELS), make("power", sync=sync)).double()
        self.two = torch.nn.Sequential(torch.nn.Linear(CHANNELS, CHANNELS), make("batch", sync=sync)).double()

    def forward(self, x, drop=False, recompute=False):
        x = self.one(x)
        if drop:
            return x
        return checkpoint(self.two, x, use_reentrant=False) if recompute else self.two(x)


def layer_left_out(worker):
    """Each worker leaves out the second layer in other updates, and in one update no worker reaches any norm."""
    model = Layers()
    shared = SharedStatistics(model)
    for update in range(4):
        for norm in (model.one[1], model.two[1]):
            norm.set_num_updates(update)
        if update != 3:
            for x, dy, _ in batches(update, worker):
                model(x, drop=update % 2 == worker).backward(dy)
        shared.reduce()
    return {"state": model.state_dict(), "differences": shared.differences()}


def recomputed(worker):
    states = []
    for recompute in (False, True):
        model = Layers(sync="batch")
        shared = SharedStatistics(model)
        for update in range(3):
            for x, dy, _ in batches(update, worker):
                model(x, recompute=recompute).backward(dy)
            shared.reduce()
        gradients = {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
        states.append({**model.state_dict(), **gradients})
    return {"states": states}


def with_ddp(worker):
    """A plain loop around torch's DistributedDataParallel, without set_num_updates and with two micro-batches.

    By default it copies the first worker's buffers to the others before a forward pass; and only the first saves.
    """
    model = torch.nn.parallel.DistributedDataParallel(Layers())
    shared = SharedStatistics(model)
    states = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for update in range(3):
        optimizer.zero_grad()
        for x, dy, _ in batches(update, 0 if worker == 0 else 2):
            model(x).backward(dy)
        shared.reduce()
        if worker == 0:
            states.append(copy.deepcopy(model.state_dict()))
            model.eval().train()
        optimizer.step()
    return {"state": model.module.state_dict(), "differences": shared.differences(), "saved": states}


def misuse(worker):
    found = {}
    norm = make("power")
    shared = SharedStatistics(norm)
    norm.set_num_updates(0)
    step(norm, *batches(0, worker)[0])
    norm.eval()
    found["after_eval"] = float(norm.updates_tracked)
    norm.train()
    try:
        norm.set_num_updates(1)
    except RuntimeError as error:
        found["not_reduced"] = str(error)
    norm.discard_pending()
    shared.reduce(absorb=False)
    norm.set_num_updates(1)
    found["after_discarding"] = float(norm.updates_tracked)
    for batch in batches(0, worker):
        step(norm, *batch)
        shared.reduce(absorb=False)
    if worker == 0:
        norm.commit()  # the other has yet to
    found["in_flight"] = shared.differences()
    found["reduced_twice"] = float(norm.updates_tracked)
    copied = copy.deepcopy(norm)
    found["copy"] = (copied.shared, copied.workers)
    found["equal"] = shared.differences()
    with torch.no_grad():
        norm.running_psi_sq[2] += worker * 0.25
        if worker == 1:
            norm.running_nu[0] = float("nan")
    found["unequal"] = shared.differences()
    return found


def not_shared(worker):
    norm = make("batch", sync="none")
    shared = SharedStatistics(norm)
    step(norm, *batches(0, worker)[0])
    shared.reduce()
    norm.commit()
    return {"state": norm.state_dict(), "differences": shared.differences()}


def collectives(worker):
    """How many, and whether they are waited for, in forward passes, backward passes and the rest of an update."""
    found = {}
    original = dist.all_reduce
    for name, options in (("power", {"sync": "batch"}), ("power", {"sync": "batch", "warmup_updates": 9}),
                          ("power_v", {"sync": "batch"}), ("batch", {"sync": "batch"}), ("batch", {})):  # fmt: skip
        model = torch.nn.Sequential(*(create_norm(name, CHANNELS, options) for _ in range(3)))
        shared = SharedStatistics(model)
        calls = []
        dist.all_reduce = lambda *args, calls=calls, **kwargs: calls.append(kwargs) or original(*args, **kwargs)
        try:
            y, counts = model(torch.randn(5, CHANNELS).requires_grad_()), [len(calls)]
            y.sum().backward()
            counts.append(len(calls) - sum(counts))
            shared.reduce(absorb=False)
            counts.append([call.get("async_op", False) for call in calls[sum(counts) :]])
        finally:
            dist.all_reduce = original
        shared.commit()
        found[name, bool(options.get("warmup_updates")), options.get("sync", "running")] = counts
    return found


def given_up(worker):
    """An update is given up after its sums went out; the next try counts alone."""
    norm = make("power")
    shared = SharedStatistics(norm)
    norm.set_num_updates(0)
    step(norm, *batches(7, worker)[0])
    shared.reduce(absorb=False)
    norm.discard_pending()
    for batch in batches(0, worker):
        step(norm, *batch)
    shared.reduce()
    norm.set_num_updates(1)
    return {"state": norm.state_dict()}


def work(worker, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(worker), WORLD_SIZE=str(WORKERS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for case in CASES:
        found["shared", case] = train_shared(case, worker)
        found["in_step", case] = train_in_step(case, worker)
    for scenario in (layer_left_out, recomputed, with_ddp, misuse, not_shared, given_up, collectives):
        found[scenario.__name__] = scenario(worker)
    torch.save(found, os.path.join(folder, f"{worker}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("workers"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.start_processes(
        work, (port, folder), nprocs=WORKERS, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the workers wait for each other"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(os.path.join(folder, f"{worker}.pt")) for worker in range(WORKERS)]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"),
]


def joined(update, numbers=(0, 1)):
    """All real batches of both workers as one: x, dy, padding."""
    parts = [
        batches(update, worker)[number]
        for number in numbers
        for worker in range(WORKERS)
        if not is_dummy(worker, number)
    ]
    return [torch.cat(part) for part in zip(*parts)]


@pytest.mark.parametrize("case", list(CASES))
def test_workers_hold_the_statistics_of_the_joined_batch(found, case):
    """Traps 4, 14 and 17: micro-batches, uneven batches, padding and a dummy batch, all in one step per update."""
    alone = make(case)
    for update in range(UPDATES):
        alone.set_num_updates(update)
        if "warm_up" in case or CASES[case][0] != "power":
            # What flows back is decided by the statistics of each batch, which one joined batch does not have.
            for worker in range(WORKERS):
                for batch in batches(update, worker):
                    step(alone, *batch)
        else:
            x, dy, padding = joined(update)
            _, dx = step(alone, x, dy, padding)
            if case == "power":
                own = [found[worker]["shared", case]["dx"][update] for worker in range(WORKERS)]
                close(torch.cat([own[0][0], own[1][0], own[0][1]]), dx, 1e-12)
                assert torch.equal(own[1][1], torch.zeros_like(own[1][1]))
        alone.set_num_updates(update + 1)
        for name, value in alone.state_dict().items():
            for worker in range(WORKERS):
                close(found[worker]["shared", case]["states"][update][name], value, 1e-12)
    assert [found[worker]["shared", case]["differences"] for worker in range(WORKERS)] == [[], []]
    assert_same_state(*(found[worker]["shared", case]["states"][-1] for worker in range(WORKERS)))


@pytest.mark.parametrize("case", list(CASES))
def test_batches_in_step_are_the_joined_batch(found, case):
    """As torch's SyncBatchNorm, but padding and dummy batches are no part of any statistic."""
    alone = make(case)
    for update in range(UPDATES):
        alone.set_num_updates(update)
        for number in range(2):
            y, dx = step(alone, *joined(update, [number]))
            own = [found[worker]["in_step", case]["micro"][update][number] for worker in range(WORKERS)]
            if number == 1:
                assert torch.equal(own[1][1], torch.zeros_like(own[1][1]))
            real = own if number == 0 else own[:1]
            close(torch.cat([values[0] for values in real]), y, 1e-11)
            close(torch.cat([values[1] for values in real]), dx, 1e-11)
            for index, parameter in enumerate(alone.parameters()):
                close(sum(values[2 + index] for values in real), parameter.grad, 1e-11)
    for name, value in alone.state_dict().items():
        for worker in range(WORKERS):
            close(found[worker]["in_step", case]["state"][name], value, 1e-11)


def test_a_layer_left_out_by_one_worker_leaves_nobody_waiting(found):
    model = Layers()
    for update in range(3):
        for norm in (model.one[1], model.two[1]):
            norm.set_num_updates(update)
        for worker in range(WORKERS):
            for x, dy, _ in batches(update, worker):
                model(x, drop=update % 2 == worker).backward(dy)
    for worker in range(WORKERS):
        assert found[worker]["layer_left_out"]["differences"] == []
        for name, value in model.state_dict().items():
            close(found[worker]["layer_left_out"]["state"][name], value, 1e-12)
    assert model.one[1].updates_tracked == 3


def test_recomputed_forwards_in_step(found):
    """Trap 13, with collectives in the forward pass that is recomputed."""
    for worker in range(WORKERS):
        assert_same_state(*found[worker]["recomputed"]["states"])


def test_a_plain_loop_with_ddp(found):
    states = [found[worker]["with_ddp"]["state"] for worker in range(WORKERS)]
    assert_same_state(*states)
    assert states[0]["one.1.updates_tracked"] == 3 and states[0]["two.1.updates_tracked"] == 3
    assert [state["module.one.1.updates_tracked"] for state in found[0]["with_ddp"]["saved"]] == [1, 2, 3]
    assert [found[worker]["with_ddp"]["differences"] for worker in range(WORKERS)] == [[], []]


def test_what_is_not_added_up_is_not_absorbed(found):
    for worker in range(WORKERS):
        result = found[worker]["misuse"]
        assert result["after_eval"] == result["after_discarding"] == 0
        assert "SharedStatistics.reduce()" in result["not_reduced"]
        assert result["copy"] == (False, None)
        assert result["in_flight"] == [] and result["reduced_twice"] == 2


def test_differences_between_workers_are_named(found):
    for worker in range(WORKERS):
        assert found[worker]["misuse"]["equal"] == []
        unequal = found[worker]["misuse"]["unequal"]
        assert unequal[0] == "running_psi_sq by 0.25" and unequal[1].startswith("running_nu by ")


def test_an_update_is_one_asynchronous_collective(found):
    """PowerNorm after its warm-up has none in the forward and backward passes of its three norms, whatever is asked."""
    for worker in range(WORKERS):
        assert found[worker]["collectives"] == {
            ("power", False, "batch"): [0, 0, [True]],
            ("power", True, "batch"): [3, 0, [True]],
            ("power_v", False, "batch"): [3, 3, [True]],
            ("batch", False, "batch"): [3, 3, [True]],
            ("batch", False, "running"): [0, 0, [True]],
        }


def test_an_update_given_up_is_forgotten(found):
    alone = make("power")
    alone.set_num_updates(0)
    step(alone, *joined(0))
    alone.set_num_updates(1)
    for name, value in alone.state_dict().items():
        for worker in range(WORKERS):
            close(found[worker]["given_up"]["state"][name], value, 1e-12)


def test_workers_that_share_nothing(found):
    for worker in range(WORKERS):
        alone = make("batch")
        step(alone, *batches(0, worker)[0])
        alone.commit()
        assert_same_state(found[worker]["not_shared"]["state"], alone.state_dict())
        assert found[worker]["not_shared"]["differences"] == []


def test_sums_that_nobody_adds_up_are_warned_of(caplog):
    norm = make("power")
    norm.shared = True
    for batch in batches(0, 0):
        step(norm, *batch)
        norm.eval().train()
    (said,) = caplog.messages
    assert "SharedStatistics.reduce() was never called" in said


@running
def test_replicas_of_data_parallel_are_refused(name):
    """What they gather would be lost without a word."""
    norm = make(name)
    replica = norm._replicate_for_data_parallel()
    replica.weight, replica.bias = norm.weight, norm.bias  # as torch.nn.parallel.replicate does
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        replica(torch.ones(3, CHANNELS, dtype=torch.float64))
    replica.eval()(torch.ones(3, CHANNELS, dtype=torch.float64))


@running
def test_a_worker_alone_shares_with_itself(name):
    """One worker: adding up changes nothing, to the bit; no process group of several is needed for a norm in step."""
    assert name in RUNNING
    plain, shared = make(name), make(name, sync="batch")
    for update in range(2):
        for batch in batches(update, 0):
            for norm in (plain, shared):
                norm.set_num_updates(update)
                step(norm, *batch)
    assert_same_state(shared.state_dict(), plain.state_dict())
