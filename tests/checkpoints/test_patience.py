"""fairseq's count of validations without improvement, over an interruption."""

from types import SimpleNamespace

import pytest

from powernorm_fairseq.checkpoints import patience

pytest.importorskip("fairseq")


@pytest.fixture
def stop_early(monkeypatch):
    """fairseq's own function, as in a new process."""
    from fairseq_cli import train

    def forget():
        for name in ("best", "num_runs"):
            train.should_stop_early.__dict__.pop(name, None)

    forget()
    yield train.should_stop_early, forget
    forget()


def config(patience=3, **checkpoint):
    known = {"maximize_best_checkpoint_metric": False, "reset_optimizer": False, "reset_meters": False}
    return SimpleNamespace(checkpoint=SimpleNamespace(patience=patience, **{**known, **checkpoint}))


def saved(cfg):
    """The ``extra_state`` that a checkpoint gets."""
    kept = []
    patience.around_save(lambda *args: kept.append(args), SimpleNamespace(cfg=cfg), "file", {"val_loss": 1.0})
    return kept[0][2]


def load(cfg, extra_state, updates=10):
    trainer = SimpleNamespace(get_num_updates=lambda: updates)
    given = patience.around_load(lambda *args: (extra_state, "iterator"), cfg.checkpoint, trainer)
    assert given == (extra_state, "iterator")


def test_an_interruption_does_not_put_off_the_end(stop_early):
    function, forget = stop_early
    cfg = config()
    assert [function(cfg, loss) for loss in (5.0, 4.0, 4.5, 4.4)] == [False] * 4
    state = saved(cfg)
    assert state == {"val_loss": 1.0, patience.STATE: {"best": 4.0, "num_runs": 2}}
    forget()
    load(cfg, state)
    assert function(cfg, 4.3)
    forget()
    load(cfg, state)
    assert not function(cfg, 3.9) and function.num_runs == 0


@pytest.mark.parametrize(
    "changes, updates",
    [({"reset_optimizer": True}, 10), ({"reset_meters": True}, 10), ({}, 0)],  # 0: another run's parameters alone
)
def test_another_training_counts_from_the_start(stop_early, changes, updates):
    function, forget = stop_early
    function(config(), 1.0)
    state = saved(config())
    forget()
    load(config(**changes), state, updates)
    assert not hasattr(function, "best")


def test_without_patience_nothing_is_kept(stop_early):
    function, _ = stop_early
    function(config(), 1.0)  # of another training in this process
    assert saved(config(patience=-1)) == {"val_loss": 1.0}
    load(config(), None)
    load(config(), {"val_loss": 1.0})
