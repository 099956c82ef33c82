"""Activation checkpointing of whole models: fairseq's wrapper and torch's, with dropout."""

import copy
import functools

import pytest
import torch
from fairseq import utils
from torch.utils.checkpoint import checkpoint

from tests.models.helpers import build, hydra, inputs_for, loss_of


@pytest.fixture(autouse=True)
def exact_attention(monkeypatch):
    """fairseq's own attention takes its softmax in float32 whatever the input is."""
    monkeypatch.setattr(utils, "softmax", lambda x, dim, onnx_trace=False: torch.softmax(x, dim))


def recomputed(forward, reentrant, *args, **kwargs):
    return checkpoint(lambda *given: forward(*given, **kwargs), *args, use_reentrant=reentrant)


def model_of(name, norm, how):
    fields = {"norm": norm, "dropout": 0.1, "attention_dropout": 0.1}
    if norm == "power":
        fields["norm_warmup_updates"] = 2
    if how.startswith("fairseq"):
        fields.update(checkpoint_activations=True, offload_activations=how.endswith("offload"))
    model = build(hydra(name, **fields)).double()
    if how.startswith("torch"):
        for stack in (getattr(model, "encoder", None), model.decoder):
            for layer in stack.layers if stack is not None else []:
                layer.forward = functools.partial(recomputed, layer.forward, how.endswith("reentrant"))
    return model


def train(model, batches, updates=3):
    """The gradients and the state after each update of several micro-batches."""
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for update in range(updates):
        optimizer.zero_grad()
        torch.manual_seed(update)
        for batch in batches:
            model.set_num_updates(update)
            loss_of(model, batch).backward()
        found = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
        optimizer.step()
        model.set_num_updates(update + 1)
        found.update({f"state of {key}": value for key, value in copy.deepcopy(model.state_dict()).items()})
        seen.append(found)
    return seen


@functools.lru_cache(maxsize=None)
def plain(name, norm):
    return train(model_of(name, norm, ""), [inputs_for(name), inputs_for(name, more_target=1)])


HOW = ["fairseq", "fairseq, offload", "torch", "torch, reentrant"]
TRANSLATION, LANGUAGE_MODEL = "transformer_norm_tiny", "transformer_lm_norm_tiny"
CASES = [(how, norm, TRANSLATION) for how in HOW for norm in ("batch", "power", "power_v")]
CASES += [(how, "power", LANGUAGE_MODEL) for how in HOW]


@pytest.mark.parametrize(("how", "norm", "name"), CASES)
def test_recomputation_changes_nothing(how, norm, name):
    """Trap 13, the forward runs twice: all gradients, parameters, statistics and counters after each update."""
    seen = train(model_of(name, norm, how), [inputs_for(name), inputs_for(name, more_target=1)])
    for update, (found, wanted) in enumerate(zip(seen, plain(name, norm)), start=1):
        assert list(found) == list(wanted)
        for key, value in wanted.items():  # gradients of a tensor used in several layers are added up in another order
            torch.testing.assert_close(
                found[key],
                value,
                rtol=1e-9,
                atol=1e-12,
                msg=lambda m, key=key, update=update: f"update {update}, {key}: {m}",
            )
            if "updates_" in key:
                assert torch.equal(found[key], value), key
        tracked = [value for key, value in found.items() if key.endswith("updates_tracked")]
        assert tracked and all(value == update for value in tracked)
