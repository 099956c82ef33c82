"""What counts as reached."""

import pytest

from benchmarks.targets import of_norm, target


def record(ratio=1.0, **changes):
    made = {
        "norm": "power", "path": "native", "variant": "", "mode": "train", "rows": 4096, "channels": 512, "itemsize": 4,
        "device": "cpu", "threads": 1, "ratio": {"median": ratio}, "against": {}, "peak_memory": 2.0,
    }  # fmt: skip
    return {**made, **changes}


def decided(*args, **changes):
    return [(one["name"], one["limit"], one["met"]) for one in of_norm(record(*args, **changes))]


def test_a_target_itself_is_met():
    assert target("x", 0.95, 0.95)["met"] and not target("x", 0.95, 0.951)["met"]
    assert target("x", 25, 25, at_most=False)["met"] and not target("x", 25, 24.9, at_most=False)["met"]


@pytest.mark.parametrize(
    "variant, limit", [("", 0.95), ("masked", 0.95), ("bf16", 0.95), ("warm-up", 1.15), ("warm-up, masked", 1.15)]
)
def test_power_in_training(variant, limit):
    assert decided(limit, variant=variant) == [("time / LayerNorm", limit, True)]
    assert decided(limit + 0.01, variant=variant) == [("time / LayerNorm", limit, False)]


def test_evaluation_within_the_cache_and_beyond():
    assert decided(0.9, mode="eval", rows=512) == [("time / LayerNorm", 0.85, False)]
    assert decided(0.9, mode="eval") == [("time / LayerNorm", 1.05, True)]
    assert decided(0.9, mode="eval", itemsize=2) == [("time / LayerNorm", 0.85, False)]


def test_other_norms():
    assert decided(0.9, norm="ada") == [("time / LayerNorm", 0.9, True)]
    assert decided(9.0, norm="batch", against={"BatchNorm1d": {"median": 1.01}}) == [("time / BatchNorm1d", 1.0, False)]
    assert decided(4.6, path="torch", peak_memory=2.1) == [
        ("time / LayerNorm", 4.5, False), ("peak memory / input", 2.2, True),
    ]  # fmt: skip
    assert decided(30.0, path="naive", against={"fused": {"median": 24.0}}) == [("naive / fused", 25, False)]


def test_there_are_none_elsewhere():
    for changes in ({"device": "cuda"}, {"threads": 2}, {"rows": 100}, {"norm": "rms"}, {"path": "compile"}):
        assert decided(99.0, **changes) == []
