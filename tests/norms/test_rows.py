"""Passes in blocks are the passes over the whole."""

import pytest
import torch

from powernorm_fairseq.norms import create_norm, rows
from tests.norms.helpers import RUNNING, Batches, close, step


@pytest.mark.parametrize("block_elements", [1, 6, 13, 1000])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("warmup", [0, 9])
@pytest.mark.parametrize("name", [*RUNNING, "rms"])
def test_the_size_of_blocks_does_not_matter(monkeypatch, name, warmup, groups, padded, block_elements):
    results = []
    for size in (block_elements, 1 << 16):
        monkeypatch.setattr(rows, "BLOCK_ELEMENTS", size)
        norm = create_norm(name, 6, {"groups": groups, "warmup_updates": warmup}).double()
        batches = Batches(2, padded=padded)
        values = []
        for _ in range(2):
            x, dy, mask, _, _, _ = batches.draw()
            values += step(norm, x, dy, mask)
            values += [parameter.grad for parameter in norm.parameters()]
        results.append(values + list(norm.state_dict().values()))
    for one, other in zip(*results):
        close(one, other, 1e-12)


def test_blocks_cover_all_rows(monkeypatch):
    monkeypatch.setattr(rows, "BLOCK_ELEMENTS", 8)
    for count in (0, 1, 5, 12):
        x = torch.arange(float(3 * count)).view(count, 3)
        assert torch.equal(torch.cat([x[block] for block in rows.blocks(x)] or [x]), x)


@pytest.mark.parametrize("place", [0, 4, 9])
def test_any_nonzero_finds_one_number(monkeypatch, place):
    monkeypatch.setattr(rows, "BLOCK_ELEMENTS", 4)
    dy, padding = torch.zeros(10, 2), torch.zeros(10, dtype=torch.bool)
    assert not rows.any_nonzero(dy, None) and not rows.any_nonzero(dy[:0], None)
    dy[place, 1] = 1e-30
    assert rows.any_nonzero(dy, None) and rows.any_nonzero(dy, padding)
    padding[place] = True
    assert not rows.any_nonzero(dy, padding)
    dy[place, 0] = float("nan")
    assert rows.any_nonzero(dy, None) and not rows.any_nonzero(dy, padding)
