"""Each script once, at sizes at which its figures mean nothing."""

import pytest
import torch

from benchmarks import decoding, norms, records, startup, step, timing, variants, watching
from powernorm_fairseq.__main__ import COMMANDS
from powernorm_fairseq.norms import kernels


class Quick(timing.Clock):
    """Calls a job as often as asked at first, and once from then on."""

    def __init__(self):
        super().__init__(shortest=0.0)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_norms(mode):
    chosen = [one for one in variants.variants("cpu", lambda formula: formula) if mode in one.modes]
    assert len({one.key for one in chosen}) == len(chosen)
    found = norms.measure(chosen, mode, 64, 16, 1e10, 3, 0.0, clock=Quick(), memory=mode == "train")
    assert len(found) == len(chosen)
    by = {(one["norm"], one["path"], one["variant"]): one for one in found}
    assert by["layer", "pytorch", ""]["ratio"]["median"] == 1.0
    assert by["layer", "pytorch", "bf16"]["itemsize"] == 2
    assert "BatchNorm1d" in by["batch", "torch", ""]["against"]
    if kernels.available("native") is not None:
        assert "fused" in by["power", "naive", ""]["against"]
    if mode == "train":
        assert by["layer", "pytorch", ""]["peak_memory"] >= 2.0
        assert by["power", "torch", "warm-up"]["passes"] == 6 and by["batch", "torch", ""]["passes"] == 8
    for one in found:
        assert one["roofline"] > 0 and one["seconds"]["low"] <= one["seconds"]["high"]
        assert records.in_words({"family": "norms", **one})


def test_the_training_step_ends_updates_and_the_warm_up_is_one():
    for one in variants.variants("cpu"):
        if one.norm != "power" or one.path != "torch" or one.variant not in ("", "warm-up"):
            continue
        module = None

        def keep(channels, make=one.module):
            nonlocal module
            module = make(channels)
            return module

        one.module = keep
        job = variants.job(one, "train", 32, 16)
        for _ in range(3):
            job.run()
        assert module.updates_tracked == 2  # the third is pending
        assert module.divides_by_batch_psi() == (one.variant == "warm-up")


def test_step():
    settings = {name: setting for name, setting in step.SETTINGS.items() if "encoder" not in name}
    found = step.measure(settings, 64, 3, 0.0, "tiny", 100, Quick())
    assert [one["setting"] for one in found] == ["LayerNorm", "PowerNorm everywhere", "PowerNorm everywhere, naive"]
    # Two layers a stack: 2 * 2 + 1 norms in the encoder, 2 * 3 + 1 in the decoder.
    assert {one["norms"] for one in found} == {5 + 7}
    assert all(one["share"] > 0 for one in found)
    assert [len(one["targets"]) for one in found] == [0, 1, 0]


def test_watching():
    one, twenty = watching.measure("power", "tiny", 64, 3, 0.0, 100, Quick())
    assert (one["interval"], twenty["interval"]) == (1, 20)
    assert twenty["adds"]["median"] == pytest.approx(one["adds"]["median"] / 20, rel=1e-2)


def test_decoding(tmp_path):
    paths = decoding.prepare(tmp_path, "tiny", 200)
    assert len(paths) == (5 if "fold" in COMMANDS else 3)
    found = decoding.measure(paths, tmp_path, 2, 4, 3, 0.0, "tiny", Quick())
    assert [one["setting"] for one in found] == list(paths)
    for one in found:
        assert one["steps"] == 5 and one["ratio"]["median"] > 0
        if one["setting"].endswith(decoding.FOLDED):
            assert one["note"].startswith("2 of 2 ")


def test_startup(monkeypatch):
    times = iter([[9.0, 9.0, ["triton"]], [2.0, 0.1, []], [3.0, 0.2, []], [2.5, 0.4, []]])
    monkeypatch.setattr(startup, "once", lambda: next(times))
    record = startup.measure(3)
    assert record["adds"]["median"] == 0.2 and record["loaded"] == []
    assert all(one["met"] for one in record["targets"])


@pytest.mark.slow
def test_the_import_loads_no_kernels():
    fairseq, plugin, loaded = startup.once()
    assert loaded == [] and fairseq > 0 and plugin > 0
