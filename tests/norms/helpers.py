"""What the tests of the norms share."""

import numpy as np
import pytest
import torch

from powernorm_fairseq.norms import create_norm

NAMES = ["layer", "layer_simple", "detach", "ada", "batch", "power", "power_v", "rms", "scale", "none"]
RUNNING = ["batch", "power", "power_v"]
running = pytest.mark.parametrize("name", RUNNING)
ASSIGNS = "assign" in torch.nn.Module.load_state_dict.__code__.co_varnames  # torch 2.1


def close(actual, wanted, tolerance=1e-10):
    """Asserts equality up to ``tolerance``, relative to the largest number wanted."""
    actual = actual.detach().numpy() if isinstance(actual, torch.Tensor) else np.asarray(actual)
    wanted = wanted.detach().numpy() if isinstance(wanted, torch.Tensor) else np.asarray(wanted)
    assert actual.shape == wanted.shape, (actual.shape, wanted.shape)
    assert np.isfinite(actual).all()
    scale = max(1e-300, float(np.abs(wanted).max(initial=0)))
    error = float(np.abs(actual - wanted).max(initial=0)) / scale
    assert error <= tolerance, error


def tokens(rng, rows, channels, offset=0.3):
    """Real-looking tokens: channels differ in size, and their means are not zero."""
    sizes = 0.5 + rng.random(channels)
    return (rng.standard_normal((rows, channels)) + offset) * sizes


def with_parameters(norm, rng):
    """Moves the parameters away from ones and zeros, which hide mistakes."""
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter += torch.as_tensor(0.2 * rng.standard_normal(tuple(parameter.shape)), dtype=parameter.dtype)
    return norm


def step(norm, x, dy, mask=None):
    """Forward and backward of a tensor or array: y, dx."""
    x = torch.as_tensor(x).clone().requires_grad_()
    norm.zero_grad()
    y = norm(x) if mask is None else norm(x, mask)
    y.backward(torch.as_tensor(dy).to(y.dtype))
    return y.detach(), x.grad


def assert_same_state(actual, wanted):
    """Asserts that two state_dicts are equal, bitwise."""
    assert list(actual) == list(wanted)
    for name in wanted:
        assert actual[name].dtype == wanted[name].dtype and torch.equal(actual[name], wanted[name]), name


class Batches:
    """Batches (T, B, C) with padding, and their real tokens as arrays (N, C)."""

    def __init__(self, seed, time=5, batch=3, channels=6, padded=True):
        self.rng = np.random.default_rng(seed)
        self.shape = time, batch, channels
        self.padded = padded

    def draw(self):
        """x, dy as tensors full of nonsense at padding, the mask (B, T), and the real rows of x and dy."""
        time, batch, channels = self.shape
        mask = self.rng.random((batch, time)) < 0.4
        mask[0, 0] = False
        if not self.padded:
            mask[:] = False
        real = ~mask.T
        x = tokens(self.rng, time * batch, channels).reshape(self.shape)
        dy = self.rng.standard_normal(self.shape) + 0.2
        real_x, real_dy = x[real], dy[real]
        x[~real], dy[~real] = np.nan, np.nan
        given = torch.as_tensor(mask) if self.padded else None
        return torch.as_tensor(x), torch.as_tensor(dy), given, real_x, real_dy, real

    @staticmethod
    def real(tensor, real):
        """The real rows of a tensor (T, B, C); asserts that the others are exactly zero."""
        tensor = tensor.detach().numpy()
        assert (tensor[~real] == 0).all()
        return tensor[real]


def make(name, dim=6, **options):
    """A float64 norm with layer scale whose parameters are not ones and zeros."""
    return with_parameters(create_norm(name, dim, {"groups": 2, **options}).double(), np.random.default_rng(9))


def statistics(norm):
    """Copies of parameters and buffers as they are, without the commit that state_dict() brings about."""
    return {name: value.detach().clone() for name, value in [*norm.named_parameters(), *norm.named_buffers()]}


def some(seed, rows=8, dim=6):
    """x and dy (rows, dim), always the same for a seed."""
    rng = np.random.default_rng(seed)
    return torch.as_tensor(tokens(rng, rows, dim)), torch.as_tensor(rng.standard_normal((rows, dim)) + 0.1)
