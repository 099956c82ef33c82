"""Models' configs in Hydra's store are built when they are asked for, and are what they would have been."""

import copy
import inspect
import pickle

import pytest
from fairseq.models import MODEL_DATACLASS_REGISTRY
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import powernorm_fairseq  # noqa: F401
from powernorm_fairseq.models.stored import stored_when_asked_for


@pytest.mark.parametrize("name", ["transformer_pn", "transformer_norm_tiny", "transformer_lm_adanorm_ptb"])
def test_a_stored_config_is_the_one_of_the_dataclass(name):
    wanted = MODEL_DATACLASS_REGISTRY[name]()
    wanted._name = name
    stored = ConfigStore.instance().load(f"model/{name}.yaml")
    assert stored.node == OmegaConf.structured(wanted)
    assert (stored.name, stored.group, stored.provider) == (f"{name}.yaml", "model", "fairseq")
    assert stored.package == inspect.signature(ConfigStore.store).parameters["package"].default
    # Launchers send the store to other processes, and old versions of Hydra copy it.
    entry = ConfigStore.instance().repo["model"][f"{name}.yaml"]
    assert pickle.loads(pickle.dumps(entry)).node == stored.node == copy.deepcopy(entry).node


def test_what_is_loaded_may_be_changed_without_changing_the_store():
    stored = ConfigStore.instance().load("model/transformer_pn.yaml")
    before = stored.node.encoder_layers
    stored.node.encoder_layers = before + 1
    assert ConfigStore.instance().load("model/transformer_pn.yaml").node.encoder_layers == before


def test_other_groups_are_stored_at_once():
    store = ConfigStore.instance()
    with stored_when_asked_for("model"):
        store.store(name="for_a_test", node={"a": 1}, group="group_of_a_test")
    assert store.repo.pop("group_of_a_test")["for_a_test.yaml"].node.a == 1
    assert "store" not in vars(store)
