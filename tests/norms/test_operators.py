"""The norms under torch.compile: one graph, and the same numbers to the bit."""

import copy
import gc

import pytest
import torch

from powernorm_fairseq.norms import create_norm, gradient_scale, operators, padding_scope
from tests.norms.helpers import RUNNING

pytestmark = pytest.mark.skipif(not operators.AVAILABLE, reason="torch.library of torch 2.4 or later")

NORMS = [
    *[("power", options) for options in ({"groups": 2, "warmup_updates": 2}, {"groups": 0, "numerics": "released"})],
    *[("power_v", {"groups": 2}), ("batch", {}), ("batch", {"groups": 4, "affine": False})],
    *[("ada", {}), ("ada", {"numerics": "released"}), ("detach", {}), ("rms", {}), ("scale", {})],
]


def counted(norm, backend="aot_eager"):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(norm, fullgraph=True, backend=counter), counter


def train(norm, call, stated, updates=4):
    generator = torch.Generator().manual_seed(1)
    results = []
    for update in range(updates):
        if stated:
            norm.set_num_updates(update)
        x = torch.randn(6, 3, 8, generator=generator).requires_grad_()
        mask = torch.zeros(3, 6, dtype=torch.bool)
        mask[1, 4:] = True
        y = call(x, mask)
        with gradient_scale(1.0 + update):  # known when the backward pass runs, not when it is compiled
            y.backward(torch.randn(6, 3, 8, generator=generator) * (1.0 + update))
        results += [y.detach(), x.grad]
    return [*results, *[p.grad for p in norm.parameters()], *norm.state_dict().values()]


@pytest.mark.parametrize("name, options", NORMS)
def test_a_compiled_norm_is_one_graph_and_gives_the_same_bits(name, options):
    for stated in (False, True) if name in RUNNING else (False,):
        norm = create_norm(name, 8, options)
        other = copy.deepcopy(norm)
        call, counter = counted(other)
        for one, wanted in zip(train(other, call, stated), train(norm, norm, stated)):
            assert torch.equal(one, wanted)
        # Neither the number of updates nor the end of the warm-up compiles anything anew.
        assert counter.frame_count == 1
        norm.eval(), other.eval()
        x = torch.randn(5, 2, 8)
        for mode in (torch.no_grad, torch.enable_grad):
            with mode():
                assert torch.equal(call(x), norm(x))


def test_a_scope_reaches_a_compiled_norm():
    norm = create_norm("power", 8, {"groups": 2})
    x, mask = torch.randn(6, 3, 8), torch.zeros(3, 6, dtype=torch.bool)
    mask[0, 2:] = True
    wanted = norm(x, mask)
    call, _ = counted(norm)
    with padding_scope(mask):
        assert torch.equal(call(x), wanted)


@pytest.mark.slow
def test_inductor_compiles_a_norm_between_other_layers():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8), create_norm("power", 8, {"groups": 2}), torch.nn.Linear(8, 8)]
    model = torch.nn.Sequential(*layers, create_norm("batch", 8))
    other = copy.deepcopy(model)
    call, counter = counted(other, "inductor")
    for _ in range(3):
        x = torch.randn(5, 2, 8)
        for one, of in ((model, model), (call, other)):
            of.zero_grad()
            one(x).square().sum().backward()
    assert counter.frame_count == 1
    for one, wanted in zip([*other.state_dict().values()], [*model.state_dict().values()]):
        torch.testing.assert_close(one, wanted)
    for one, wanted in zip(other.parameters(), model.parameters()):
        torch.testing.assert_close(one.grad, wanted.grad)


def rows(*shape, grad=False):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).requires_grad_(grad)


@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_operators_are_registered_as_torch_wants_them(groups, padded):
    ops = getattr(torch.ops, operators.NAMESPACE)
    norm, batch = create_norm("power", 6, {"groups": groups}), create_norm("batch", 6)
    x, dy, weight, bias = rows(5, 6, grad=True), rows(5, 6), rows(6, grad=True), rows(6, grad=True)
    padding = torch.tensor([False, True, False, False, True]) if padded else None
    psi_sq, nu = torch.rand(6) + 0.5, torch.rand(6)
    calls = {
        "group_rms_scale": (x, weight, bias, padding, groups, 1e-5, psi_sq, nu),
        "power_norm": (x, weight, bias, padding, psi_sq, nu, norm.token, groups, 1e-5, False, False),
        "power_norm_v": (x, weight, bias, padding, None, groups, 1e-5),
        "batch_norm": (x, weight, bias, padding, batch.token, groups, 1e-5),
        "standardize": (x, 1e-5, padded, False, groups == 2, 1.5, 0.1),
    }
    for name, arguments in calls.items():
        operator = getattr(ops, name).default
        torch.library.opcheck(operator, arguments)
    rest = [part.detach() for part in ops.power_norm(*calls["power_norm"])[1:]]
    plain = (x.detach(), dy, weight.detach(), padding)
    torch.library.opcheck(ops.power_norm_backward.default, (*plain, *rest, True))
    torch.library.opcheck(ops.group_rms_scale_backward.default, (*plain, rest[0], psi_sq, nu, False))
    for name in ("power_norm_v", "batch_norm"):
        rest = [part.detach() for part in getattr(ops, name)(*calls[name])[1:]]
        torch.library.opcheck(getattr(ops, f"{name}_backward").default, (*plain, *rest, True))
    _, mean, inverse = ops.standardize(x.detach(), 1e-5, False, False, False, 1.0, 0.1)
    torch.library.opcheck(
        ops.standardize_backward.default, (x.detach(), dy, mean, inverse, 1e-5, False, False, False, 1.0, 0.1)
    )


def test_a_token_names_one_norm_only_and_keeps_none_alive():
    norm = create_norm("power", 6)
    other = copy.deepcopy(norm)
    assert int(other.token) != int(norm.token)
    row = torch.cat([torch.tensor([0.0, 3.0]), torch.ones(18)]).double()
    torch.ops.powernorm_fairseq.record(other.token, row)
    norm.commit(), other.commit()
    assert (float(norm.updates_tracked), float(other.updates_tracked)) == (0, 1)
    number = int(other.token)
    del other
    gc.collect()
    assert number not in operators._owners
