"""What looks wrong in a checkpoint's running statistics: each finding from a state that has just that, and no other."""

import copy
import json
import math
import re

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema.ema import EMA
from omegaconf import OmegaConf

from powernorm_fairseq.__main__ import main
from powernorm_fairseq.checkpoints.average import average_checkpoints, load_checkpoint, save_checkpoint, with_note
from powernorm_fairseq.checkpoints.inspect import averaged_statistics, compare, findings, running_norms
from tests.commands import in_this_process
from tests.models.helpers import small
from tests.models.test_runs import train_flags

POWER, POWER_V, BATCH = "encoder.layers.0.self_attn_layer_norm", "encoder.layer_norm", "decoder.layer_norm"
CHANNELS = 8


def healthy(updates=100):
    """A checkpoint with a norm of each kind that nothing is wrong with."""
    generator = torch.Generator().manual_seed(3)

    def rand():
        return torch.rand(CHANNELS, generator=generator)

    model = {"encoder.embed_tokens.weight": rand(), "decoder.layers.0.final_layer_norm.weight": rand()}
    for site in (POWER, POWER_V, BATCH):
        model.update({f"{site}.weight": 0.5 + rand(), f"{site}.bias": rand() - 0.5})
        for name, value in (("tracked", updates), ("skipped", 0), ("bounded", 0)):
            model[f"{site}.updates_{name}"] = torch.tensor(float(value))
    model.update({f"{POWER}.running_psi_sq": 0.1 + rand(), f"{POWER}.running_nu": rand() - 0.5})
    model.update({f"{POWER_V}.running_psi_sq": 0.1 + rand()})
    model.update({f"{BATCH}.running_mean": rand() - 0.5, f"{BATCH}.running_var": 0.1 + rand()})
    history = {"optimizer_name": "FairseqAdam", "lr_scheduler_state": {}, "num_updates": updates}
    return {"model": model, "optimizer_history": [history], "extra_state": {}}


def changed(site, entry, change):
    """A healthy checkpoint with one entry changed in place, or replaced by what ``change`` returns."""
    state = healthy()
    key = f"{site}.{entry}"
    replaced = change(state["model"][key])
    if replaced is not None:
        state["model"][key] = replaced
    return state


def put(place, value):
    def change(tensor):
        tensor[place] = value

    return change


def counted(**counters):
    """A healthy checkpoint with counters of all norms set."""
    state = healthy()
    for key in state["model"]:
        name = key.rpartition("updates_")[2]
        if name in counters:
            state["model"][key].fill_(counters[name])
    return state


CASES = [
    (lambda: changed(POWER, "running_psi_sq", put(1, math.nan)), f"^{POWER}: running_psi_sq is not finite in 1 of 8"),
    (lambda: changed(POWER, "running_nu", put(slice(0, 2), -math.inf)), "running_nu is not finite in 2 of 8"),
    (lambda: changed(BATCH, "running_mean", put(1, math.inf)), "running_mean is not finite in 1 of 8"),
    (lambda: changed(BATCH, "running_var", put(1, math.nan)), "running_var is not finite in 1 of 8"),
    (lambda: changed(POWER_V, "weight", put(0, math.nan)), "weight is not finite in 1 of 8"),
    (lambda: changed(POWER_V, "running_psi_sq", put(2, 0)), rf"^{POWER_V}: psi\^2 is 0 or less in 1 of 8"),
    (lambda: changed(BATCH, "running_var", lambda t: t.zero_()), rf"^{BATCH}: var is 0 or less in 8 of 8"),
    (
        lambda: changed(POWER, "running_psi_sq", lambda t: t.fill_(1)),
        f"^{POWER}: statistics are at their initial values, though 100 updates",
    ),
    (
        lambda: changed(POWER_V, "running_psi_sq", lambda t: t.fill_(1)),
        f"^{POWER_V}: statistics are at their initial values, though 100 updates",
    ),
    (lambda: changed(POWER, "running_nu", lambda t: t.zero_()), "running_nu is 0 everywhere, though 100 updates"),
    (
        lambda: changed(POWER_V, "running_psi_sq", put(2, 1e5)),
        r"psi\^2 exceeds 10000 times its median 0\.\d+ in 1 of 8 channels \(largest 1e\+05\)",
    ),
    (lambda: changed(BATCH, "running_var", put(slice(2, 4), 1e-9)), "var is below 1e-06 .* in 2 of 8 .* dead"),
    (lambda: changed(POWER, "weight", put(2, -200)), r"the largest \|gain\|, 200, is more than 100 times the median"),
    (lambda: counted(tracked=97, skipped=3), rf"^{POWER}, {POWER_V} and 1 more: 3 updates skipped \(3\.00%\)"),
    (lambda: counted(bounded=25), r"the bound on nu acted in 25 updates \(25\.00%\)"),
    (lambda: changed(POWER, "running_nu", lambda t: t.half()), f"^{POWER}: kept in half precision: running_nu$"),
    (
        lambda: changed(BATCH, "updates_tracked", lambda t: t.bfloat16()),
        f"^{BATCH}: kept in half precision: updates_tracked$",
    ),
    (lambda: counted(tracked=0), "^the running statistics follow 0 of the run's 100 updates"),
    (lambda: counted(tracked=96.0), "follow 96 of the run's 100 updates.*--reestimate"),
    (lambda: counted(tracked=99.5), r"averaged or decayed like parameters \(updates_tracked is 99.5"),
    (
        lambda: changed(BATCH, "updates_tracked", lambda t: t.fill_(60)),
        f"^updates_tracked differs between norms: 60 in {BATCH}, 100 in {POWER}$",
    ),
    (lambda: with_note(healthy(), {"averaged": ["a.pt", "b.pt"]}), "the mean of 2 checkpoints'.*--reestimate"),
]


@pytest.mark.parametrize(("make", "message"), CASES)
def test_each_finding_alone(make, message):
    found = findings(make())
    assert len(found) == 1 and re.search(message, found[0]), found


def test_a_counter_that_is_missing():
    state = healthy()
    del state["model"][f"{POWER}.updates_tracked"]
    assert findings(state) == [f"{POWER}: has no updates_tracked"]


def without_history(state):
    del state["optimizer_history"]
    return state


@pytest.mark.parametrize(
    "state",
    [
        healthy(),
        healthy(0),
        without_history(healthy()),
        {**healthy(500), "optimizer_history": [{"num_updates": 20}]},  # pretrained, then fine-tuned
        {"model": {"decoder.layer_norm.weight": torch.ones(3)}, "optimizer_history": [{"num_updates": 9}]},
        with_note(counted(tracked=50), {"averaged": ["a.pt", "b.pt"], "reestimated": {"batches": 200}}),
        with_note(healthy(), {"averaged": ["a.pt"]}),
    ],
)
def test_nothing_to_find(state):
    assert findings(state) == [] and averaged_statistics(state) is None


def test_a_new_model_is_at_its_initial_values():
    model = small("transformer_norm_tiny", norm="power").float()
    assert findings({"model": model.state_dict(), "optimizer_history": []}) == []


def test_layers_left_out_at_random_track_fewer_updates():
    state = changed(BATCH, "updates_tracked", lambda t: t.fill_(60))
    assert findings({**state, "cfg": OmegaConf.create({"model": {"decoder_layerdrop": 0.4}})}) == []
    assert len(findings({**state, "cfg": OmegaConf.create({"model": {"decoder_layerdrop": 0.0}})})) == 1


def test_skipped_updates_explain_fewer_tracked_ones():
    """A norm that skipped an update is not one that was averaged."""
    state = healthy()
    for site, skipped in ((POWER, 3), (POWER_V, 1)):
        state["model"][f"{site}.updates_tracked"].fill_(100 - skipped)
        state["model"][f"{site}.updates_skipped"].fill_(skipped)
    assert averaged_statistics(state) is None
    assert [text.partition(":")[2][:18] for text in findings(state)] == [" 3 updates skipped", " 1 updates skipped"]


def test_moving_averages_of_the_parameters_are_seen():
    """Trap 19: EMA multiplies buffers and counters like parameters."""
    model = small("transformer_norm_tiny", norm="power").float()
    ema = EMA(model, EMAConfig(store_ema=True, ema_decay=0.9), device=torch.device("cpu"))
    for update in range(1, 6):
        for key, value in model.state_dict().items():
            if key.endswith("updates_tracked"):
                value.fill_(update)
        ema.step(model, update)
    state = {"model": model.state_dict(), "optimizer_history": [{"num_updates": 5}]}
    assert averaged_statistics(state) is None
    assert "--reestimate" in averaged_statistics({**state, "model": ema.get_model().state_dict()})


@pytest.fixture(scope="module")
def trained(translation_data, tmp_path_factory):
    """Checkpoints after 3 and 6 updates of a model with all three kinds of norm."""
    folder = tmp_path_factory.mktemp("trained")
    norms = ["--norm", "power", "--encoder-norm-ff", "power_v", "--decoder-norm-ff", "batch"]
    in_this_process(
        "fairseq-train", *train_flags(translation_data, "translation", folder, *norms, "--max-update", 6),
        "--save-interval-updates", 3, "--disable-validation",
    )  # fmt: skip
    return folder / "checkpoint_1_3.pt", folder / "checkpoint_last.pt"


def test_a_trained_checkpoint_looks_right(trained, capsys):
    assert main(["inspect", *map(str, trained)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("nothing looks wrong") == 2 and "checkpoint_last.pt: 6 updates" in shown
    norms = running_norms(load_checkpoint(trained[1])["model"])
    assert [norm["updates_tracked"] for norm in norms.values()] == [6] * (2 * 2 + 1 + 3 * 2 + 1)
    rows = [line.split() for line in shown.splitlines() if line.startswith("encoder.layers.0.self_attn_layer_norm ")]
    assert rows[0][1:6] == ["power", "3", "0", "0", "psi^2"] and rows[1][1:6] == ["power", "6", "0", "0", "psi^2"]
    assert rows[2][1] == "differs"
    scale = norms["encoder.layers.0.self_attn_layer_norm"]["running_psi_sq"]
    assert [float(text) for text in rows[1][6:9]] == pytest.approx(
        [scale.min().item(), scale.median().item(), scale.max().item()], rel=1e-3
    )


def test_the_mean_that_fairseqs_script_writes_is_seen(trained, tmp_path, capsys):
    """Trap 19: scripts/average_checkpoints.py averages all floating entries and keeps one file's number of updates."""
    first, last = (load_checkpoint(path) for path in trained)
    mean = copy.deepcopy(last)
    for key, value in mean["model"].items():
        mean["model"][key] = (value + first["model"][key]) / 2
    assert "updates_tracked is 4.5" in averaged_statistics(mean)
    save_checkpoint(mean, tmp_path / "mean.pt")
    assert main(["inspect", str(tmp_path / "mean.pt")]) == 3
    assert "* the running statistics were averaged" in capsys.readouterr().out
    average_checkpoints(trained, tmp_path / "ours.pt")
    ours = load_checkpoint(tmp_path / "ours.pt")
    assert averaged_statistics(ours) is None and "mean of 2 checkpoints" in findings(ours)[0]


def test_differences_to_the_bit():
    first, other = healthy(), healthy()
    compared = compare(first, other)
    assert set(compared["norms"]) == {POWER, POWER_V, BATCH, "everything else"}
    assert all(
        row == {"equal": True, "absolute": 0, "relative": 0, "where": None} for row in compared["norms"].values()
    )
    other["model"][f"{POWER}.running_nu"][3] *= 1.25
    other["model"][f"{POWER}.weight"][1] += 0.5
    other["model"][f"{BATCH}.running_mean"][2] = math.nan
    other["model"][f"{POWER_V}.bias"] = other["model"][f"{POWER_V}.bias"].double()
    other["model"]["extra"] = other["model"].pop("encoder.embed_tokens.weight")
    other["model"][f"{BATCH}.updates_tracked"] += 1
    compared = compare(first, other)
    assert (compared["only_first"], compared["only_other"]) == (["encoder.embed_tokens.weight"], ["extra"])
    rows = compared["norms"]
    shares = {}
    for name in ("weight", "running_nu"):
        a, b = (state["model"][f"{POWER}.{name}"].tolist() for state in (first, other))
        shares[name] = max(abs(x - y) for x, y in zip(a, b)) / max(map(abs, a + b))
    assert rows[POWER]["absolute"] == pytest.approx(0.5)
    assert rows[POWER]["where"] == max(shares, key=shares.get)
    assert rows[POWER]["relative"] == pytest.approx(max(shares.values()))
    assert rows[BATCH]["absolute"] == rows[BATCH]["relative"] == math.inf and not rows[BATCH]["equal"]
    assert rows[POWER_V] == {"equal": False, "absolute": 0, "relative": 0, "where": "bias"}
    assert rows["everything else"]["equal"]
    assert compare(other, other)["norms"][BATCH]["equal"], "a NaN is equal to itself"
    counted = changed(BATCH, "updates_tracked", lambda tensor: tensor + 1)
    only = {"equal": False, "absolute": 0, "relative": 0, "where": "updates_tracked"}
    assert compare(first, counted)["norms"][BATCH] == only


def test_differences_between_workers_look_wrong_when_asked(tmp_path, capsys):
    paths = [tmp_path / f"{name}.pt" for name in ("one", "same", "other")]
    states = [healthy(), healthy(), changed(POWER, "running_nu", put(0, 0.123))]
    for path, state in zip(paths, states):
        torch.save(state, path)
    one, same, other = map(str, paths)
    assert main(["inspect", one, other]) == 0
    assert f"differences from {one}" in capsys.readouterr().out
    assert main(["inspect", one, same, "--equal"]) == 0
    assert main(["inspect", one, same, other, "--equal"]) == 3
    del states[2]["model"][f"{BATCH}.bias"]
    torch.save(states[2], paths[2])
    capsys.readouterr()
    assert main(["inspect", one, other, "--equal"]) == 3
    assert f"only in the first: {BATCH}.bias" in capsys.readouterr().out


def test_json_for_scripts(tmp_path, capsys):
    torch.save(changed(POWER, "running_psi_sq", put(1, math.nan)), tmp_path / "one.pt")
    torch.save(healthy(), tmp_path / "two.pt")
    assert main(["inspect", "--json", str(tmp_path / "one.pt"), str(tmp_path / "two.pt")]) == 3
    text = capsys.readouterr().out
    read = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    one, two = read["checkpoints"]
    assert (one["num_updates"], len(one["findings"]), two["findings"]) == (100, 1, [])
    assert one["norms"][POWER]["max"] is None and one["norms"][POWER]["kind"] == "power"
    assert two["norms"][BATCH]["scale"] == "var" and two["norms"][BATCH]["max_abs_nu"] is None
    assert read["differences"][0]["norms"][POWER]["relative"] is None
    assert read["differences"][0]["norms"][BATCH]["equal"] is True


def test_a_checkpoint_without_running_norms_and_unreadable_ones(tmp_path, capsys):
    state = healthy()
    torch.save({**state, "model": {"w": torch.ones(2)}}, tmp_path / "w.pt")
    assert main(["inspect", str(tmp_path / "w.pt")]) == 0
    assert "no norm with running statistics" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "none.pt")]) == 1
    capsys.readouterr()
    for name, value in (("updates_tracked", torch.ones(0)), ("running_psi_sq", torch.ones(0))):
        damaged = {**state, "model": {**state["model"], f"{POWER}.{name}": value}}
        torch.save(damaged, tmp_path / "damaged.pt")
        assert main(["inspect", str(tmp_path / "damaged.pt")]) == 1
        assert "damaged.pt is a damaged checkpoint" in capsys.readouterr().err
    for model in ([1], None):
        torch.save({**state, "model": model}, tmp_path / "list.pt")
        assert main(["inspect", str(tmp_path / "list.pt")]) == 1
        assert "it has no model" in capsys.readouterr().err
    state["model"][f"{POWER}.running_phi"] = torch.ones(1, 8, 1, 1)
    torch.save(state, tmp_path / "old.pt")
    assert main(["inspect", str(tmp_path / "old.pt")]) == 1
    assert "`powernorm_fairseq convert` it first" in capsys.readouterr().err
