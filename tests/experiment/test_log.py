"""fairseq-train's log, as the progress lines and the curves read it."""

import pytest

from powernorm_fairseq.experiment.log import Follower, Validation, clock, statistics, validations

TRAIN = '2026-01-01 00:00:00 | INFO | train_inner | {{"epoch": 1, "loss": "{}", "num_updates": "{}", "lr": "0.1"}}\n'
VALID = (
    '2026-01-01 00:00:00 | INFO | valid | {{"epoch": 1, "valid_loss": "{}", "valid_nll_loss": "{}", '
    '"valid_num_updates": "{}"}}\n'
)


def test_validations_by_update_the_later_of_two_counts(tmp_path):
    """After an interruption training repeats some updates, and validates again."""
    log = tmp_path / "train.log"
    before = VALID.format("9.5", "9.1", 100) + TRAIN.format("8", 120) + VALID.format("8.5", "8.1", 200)
    after = VALID.format("8.4", "8.0", 200) + VALID.format("7.5", "7.0", 300)
    half = '2026-01-01 | INFO | valid | {"epoch": 1, "valid_lo'
    log.write_text(f"$ fairseq-train ...\n{before}Killed\n$ fairseq-train ...\n{after}{half}")
    assert validations(log) == [Validation(100, 9.5, 9.1), Validation(200, 8.4, 8.0), Validation(300, 7.5, 7.0)]
    assert validations(tmp_path / "no.log") == []


def test_statistics_by_update(tmp_path):
    """Lines without a new value say "None"; after an interruption the later value counts."""
    line = '2026-01-01 | INFO | train_inner | {"loss": "%s", "num_updates": "%d", "fwd_var/encoder.layer_norm": "%s"}\n'
    log = tmp_path / "train.log"
    log.write_text("".join(line % one for one in [(9, 10, 0.5), (8, 20, "None"), (7, 30, 2e-7), (9, 10, 0.75)]))
    assert statistics(log) == {"fwd_var/encoder.layer_norm": [(10, 0.75), (30, 2e-7)]}
    assert statistics(tmp_path / "no.log") == {}
    follower = Follower(log)
    follower.position = 0
    assert follower.look() and (follower.update, follower.loss) == (10, 9.0)


@pytest.mark.parametrize("form", ["| INFO | valid | %s", "[2026-01-01 00:00:00][valid][INFO] - %s", "INFO:valid:%s"])
def test_every_way_in_which_fairseq_prints_it(form, tmp_path):
    log = tmp_path / "train.log"
    log.write_text(form % '{"valid_loss": "3.5", "valid_num_updates": "7"}' + "\n")
    assert validations(log) == [Validation(7, 3.5, 3.5)]


def test_follower_reads_on_and_waits_for_whole_lines(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(TRAIN.format("9", 50))
    follower = Follower(log)
    assert not follower.look()
    with open(log, "a") as file:
        file.write(TRAIN.format("8", 60) + TRAIN.format("7.5", 70)[:40])
    assert follower.look() and (follower.update, follower.loss) == (60, 8.0)
    with open(log, "a") as file:
        file.write(TRAIN.format("7.5", 70)[40:])
    assert follower.look() and (follower.update, follower.loss) == (70, 7.5)
    assert not follower.look()


@pytest.mark.parametrize(
    "seconds, text", [(0.2, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03"), (-3, "0:00")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text
