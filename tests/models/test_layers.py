"""What the layers promise: masks, gradients, checkpointing, decoding, and fairseq's own model where norms are equal."""

import contextlib
import copy
from argparse import Namespace

import pytest
import torch
from fairseq import models, utils
from fairseq.models.transformer import TransformerModel
from torch import nn

from powernorm_fairseq.models import placement
from powernorm_fairseq.models.layers import FAST_PATH_PARAMETERS
from powernorm_fairseq.norms import NORMS
from powernorm_fairseq.norms.base import Norm
from tests.models.helpers import (
    command_line,
    dictionary,
    hydra,
    inputs_for,
    loss_of,
    sentences,
    small,
    translation_input,
)

ORDERS = {"pre": True, "post": False}
MODELS = ["transformer_norm_tiny", "transformer_lm_norm_tiny"]


@pytest.fixture(autouse=True)
def exact_attention(monkeypatch):
    """fairseq's own attention takes its softmax in float32 whatever the input is."""
    monkeypatch.setattr(utils, "softmax", lambda x, dim, onnx_trace=False: torch.softmax(x, dim))


def order(name, which):
    fields = {"decoder_normalize_before": ORDERS[which]}
    if "_lm_" not in name:
        fields["encoder_normalize_before"] = ORDERS[which]
    return fields


class Spy(Norm):
    """Keeps the mask with which it was called."""

    token_wise = False

    def normalize(self, x, padding):
        self.seen = padding
        return x


@pytest.mark.parametrize("which", ORDERS)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_each_norm_gets_the_mask_of_what_it_normalises(monkeypatch, which, checkpoint):
    """Trap 9: encoder: source mask; decoder, cross-attention and both ends included: target mask."""
    monkeypatch.setattr(placement, "create_norm", lambda name, dim, options: Spy(dim))
    fields = {**order("transformer_norm_tiny", which), "checkpoint_activations": checkpoint}
    model = small(norm="power", layernorm_embedding=True, **fields)
    net_input = translation_input()
    output = model(**net_input)[0]
    masks = {
        "encoder": net_input["src_tokens"].eq(1).t(),
        "decoder": net_input["prev_output_tokens"].eq(1).t(),
    }
    spies = {name: module for name, module in model.named_modules() if isinstance(module, Spy)}
    assert len(spies) == (14 if which == "pre" else 12)
    for name, spy in spies.items():
        assert torch.equal(spy.seen, masks[name.split(".")[0]]), name
        del spy.seen
    if checkpoint:
        output.sum().backward()
        for name, spy in spies.items():
            if ".layers." in name:
                assert torch.equal(spy.seen, masks[name.split(".")[0]]), f"{name}, recomputed"


def test_no_padding_is_no_mask(monkeypatch):
    monkeypatch.setattr(placement, "create_norm", lambda name, dim, options: Spy(dim))
    model = small(norm="power")
    tokens = sentences(5, 5, 5)
    model(tokens, None, tokens)
    assert all(module.seen is None for module in model.modules() if isinstance(module, Spy))


def test_incremental_decoding_gives_the_mask_of_the_last_step(monkeypatch):
    monkeypatch.setattr(placement, "create_norm", lambda name, dim, options: Spy(dim))
    model = small(norm="power", layernorm_embedding=True).eval()
    tokens = sentences(5, 3)
    encoder_out = model.encoder(tokens)
    state = {}
    for step in range(1, 6):
        model.decoder(tokens[:, :step], encoder_out=encoder_out, incremental_state=state)
        finished = tokens[:, step - 1 : step].eq(1)
        expected = finished.t() if finished.any() else None
        for module in model.decoder.modules():
            if isinstance(module, Spy):
                assert module.seen is expected or torch.equal(module.seen, expected)


def train(model, net_inputs, updates=3, lr=0.05):
    """Plain gradient steps, as fairseq's trainer drives the norms; returns the gradients of the last."""
    model.train()
    for number in range(updates):
        model.set_num_updates(number)
        model.zero_grad()
        for net_input in net_inputs:
            loss_of(model, net_input).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("which", ORDERS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("norm", ["batch", "power", "power_v", "layer"])
def test_more_padding_changes_nothing(norm, name, which):
    """Trap 7: neither values, gradients nor statistics, in training and afterwards; in and after the warm-up."""
    fields = {**order(name, which), "norm": norm, "layernorm_embedding": True}
    if norm == "power":
        fields["norm_warmup_updates"] = 2
    plain, padded = small(name, **fields), small(name, **fields)
    some, more = inputs_for(name), inputs_for(name, more_source=4, more_target=5)
    gradients = [train(plain, [some], updates=4), train(padded, [more], updates=4)]
    for key in gradients[0]:
        torch.testing.assert_close(gradients[0][key], gradients[1][key], rtol=1e-9, atol=1e-12, msg=key)
    states = [plain.eval().state_dict(), padded.eval().state_dict()]
    assert any("running" in key for key in states[0]) is (norm != "layer")
    for key in states[0]:
        torch.testing.assert_close(states[0][key], states[1][key], rtol=1e-9, atol=1e-12, msg=key)
    tokens = some.get("prev_output_tokens", some["src_tokens"])
    with torch.no_grad():
        real = plain(**some)[0]
        wide = padded(**more)[0][:, : real.shape[1]]
    torch.testing.assert_close(real[tokens.ne(1)], wide[tokens.ne(1)], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("which", ORDERS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("norm", NORMS)
def test_no_parameter_without_a_gradient(norm, name, which):
    """Trap 2: one backward pass reaches them all, so DistributedDataParallel needs no find_unused_parameters."""
    model = small(name, norm=norm, layernorm_embedding=True, **order(name, which))
    loss_of(model, inputs_for(name)).backward()
    without = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize("which", ORDERS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("norm", ["batch", "power", "ada", "layer"])
def test_checkpointing_gives_the_same_state(norm, name, which):
    """The whole state dict after three updates of two micro-batches, statistics and counters included."""
    fields = {**order(name, which), "norm": norm}
    if norm == "power":
        fields["norm_warmup_updates"] = 1
    batches = [inputs_for(name), inputs_for(name, more_target=1)]
    plain, checkpointed = small(name, **fields), small(name, checkpoint_activations=True, **fields)
    train(plain, batches)
    train(checkpointed, batches)
    states = [plain.state_dict(), checkpointed.state_dict()]
    assert list(states[0]) == list(states[1])
    for key in states[0]:  # gradients are added up in another order
        torch.testing.assert_close(states[0][key], states[1][key], rtol=1e-10, atol=1e-13, msg=key)
        if "updates_" in key:
            assert torch.equal(states[0][key], states[1][key]), key


@pytest.mark.parametrize("which", ORDERS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("norm", NORMS)
def test_incremental_decoding_is_full_decoding(norm, name, which):
    """Trap 10."""
    model = small(name, norm=norm, layernorm_embedding=True, **order(name, which))
    if norm != "none":
        train(model, [inputs_for(name)], lr=0.01)
    model.eval()
    tokens = sentences(8, 8, seed=5)
    source = {} if "_lm_" in name else {"encoder_out": model.encoder(sentences(7, 4, left=True))}
    with torch.no_grad():
        full = model.decoder(tokens, **source)[0]
        state = {}
        steps = [
            model.decoder(tokens[:, : step + 1], incremental_state=state, **source)[0]
            for step in range(tokens.shape[1])
        ]
    torch.testing.assert_close(torch.cat(steps, 1), full, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("norm", ["batch", "power", "power_v", "layer"])
def test_language_model_is_causal(norm):
    """In eval, and with power also in training after the warm-up: a later token changes no earlier output."""
    model = small("transformer_lm_norm_tiny", norm=norm, **({"norm_warmup_updates": 0} if norm == "power" else {}))
    train(model, [inputs_for("transformer_lm_norm_tiny")])
    one, other = sentences(8, 8, seed=5), sentences(8, 8, seed=5)
    other[:, 6:] = 7
    for training in (False, True):
        model.train(training)
        with torch.no_grad():
            same = torch.equal(model(one)[0][:, :6], model(other)[0][:, :6])
        # Batch statistics are those of all tokens, later ones included.
        assert same is (not training or norm in ("power", "layer"))


@pytest.mark.parametrize("which", ORDERS)
def test_with_layer_norm_it_is_fairseqs_transformer(which):
    """Same seed: same initial values, names of parameters (fairseq 0.12.2 has dead ones on top) and outputs."""
    fields = order("transformer_norm_tiny", which)
    flags = [f"--{stack}-normalize-before" for stack in ("encoder", "decoder") if which == "pre"]
    dims = ["layers", 2, "embed-dim", 128, "ffn-embed-dim", 256, "attention-heads", 4]
    for stack in ("encoder", "decoder"):
        flags += [part if odd else f"--{stack}-{part}" for odd, part in ((i % 2, p) for i, p in enumerate(dims))]
    cfg = command_line("transformer", "--share-all-embeddings", "--layernorm-embedding", *flags)
    words = dictionary()
    torch.manual_seed(1)
    with no_omegaconf_check():
        stock = models.build_model(cfg.model, Namespace(source_dictionary=words, target_dictionary=words)).double()
    assert isinstance(stock, TransformerModel)
    ours = small(layernorm_embedding=True, **fields)
    stock_state = {key: value for key, value in stock.state_dict().items() if not key.endswith(FAST_PATH_PARAMETERS)}
    assert list(ours.state_dict()) == list(stock_state)
    net_input = translation_input()
    with torch.no_grad():
        ours_output, stock_output = ours.eval()(**net_input)[0], stock.eval()(**net_input)[0]
    real = net_input["prev_output_tokens"].ne(1)
    torch.testing.assert_close(ours_output[real], stock_output[real], rtol=1e-12, atol=1e-12)
    small(seed=2, layernorm_embedding=True, **fields).load_state_dict(stock.state_dict())


@contextlib.contextmanager
def no_omegaconf_check():
    from fairseq.dataclass.utils import omegaconf_no_object_check

    with omegaconf_no_object_check():
        yield


@pytest.mark.parametrize("which", ORDERS)
@pytest.mark.parametrize("norm", ["layer", "power", "none"])
def test_the_fast_path_is_never_offered(norm, which):
    """Trap 1: fairseq 0.12.2 takes it in eval right after loading, when the model was never in training mode."""
    fields = {**order("transformer_norm_tiny", which), "norm": norm}
    trained = small(**fields)
    train(trained, [translation_input()], lr=0.01 if norm != "none" else 0.0)
    fresh = small(seed=2, **fields).eval()
    fresh.load_state_dict(trained.eval().state_dict())
    net_input = translation_input()
    called = []
    for module in fresh.encoder.layers.modules():
        if isinstance(module, Norm):
            module.register_forward_hook(lambda *_: called.append(1))
    with torch.no_grad():
        torch.testing.assert_close(fresh(**net_input)[0], trained(**net_input)[0], rtol=1e-12, atol=1e-12)
    assert len(called) == 4
    for layer in fresh.encoder.layers:
        assert layer.can_use_fastpath is False
        assert not set(FAST_PATH_PARAMETERS) & {name for name, _ in layer.named_parameters()}


def test_fast_path_copies_in_a_checkpoint_are_dropped():
    """A LayerNorm checkpoint of fairseq 0.12.2's own Transformer loads."""
    model = small()
    state = model.state_dict()
    for name in FAST_PATH_PARAMETERS:
        state[f"encoder.layers.1.{name}"] = torch.zeros(3)
    model.load_state_dict(state)


def test_layerdrop():
    """Dropped layers get no statistics; the model trains, and decodes with all layers or with those kept."""
    model = small("transformer_pn_tiny", encoder_layerdrop=0.5, decoder_layerdrop=0.5, encoder_layers=4)
    torch.manual_seed(3)
    model.train()
    for number in range(4):
        model.set_num_updates(number)
        loss_of(model, translation_input()).backward()
    model.eval()
    tracked = [float(layer.self_attn_layer_norm.updates_tracked) for layer in model.encoder.layers]
    assert len(set(tracked)) > 1 and max(tracked) <= 4
    with torch.no_grad():
        assert torch.isfinite(model(**translation_input())[0]).all()
    pruning = {"encoder_layers": 4, "encoder_layers_to_keep": "0,2", "decoder_layers_to_keep": "0,1"}
    kept = small("transformer_pn_tiny", **pruning)
    cfg = hydra("transformer_pn_tiny", **pruning).model
    kept.load_state_dict(model.state_dict(), model_cfg=cfg)
    assert len(kept.encoder.layers) == 2
    buffers = [dict(m.encoder.layers.named_buffers()) for m in (kept, model)]
    assert torch.equal(buffers[0]["1.final_layer_norm.running_psi_sq"], buffers[1]["2.final_layer_norm.running_psi_sq"])


@pytest.mark.parametrize("name", MODELS)
def test_kaiming_initial_values(name):
    """Linear layers of the stack: uniform within sqrt(3 / fan_in); embeddings and biases as fairseq's."""
    plain, kaiming = small(name), small(name, init="kaiming")
    linear = {
        f"{key}.weight" for key, module in plain.named_modules() if isinstance(module, nn.Linear) and ".layers." in key
    }
    assert len(linear) == (2 * 6 + 2 * 10 if "_lm_" not in name else 2 * 6)
    for (key, before), after in zip(plain.named_parameters(), kaiming.parameters()):
        if key in linear:
            bound = (3 / after.shape[1]) ** 0.5
            assert after.abs().max() <= bound
            assert float(after.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
            assert not torch.equal(before, after)
        else:
            assert torch.equal(before, after), key


@pytest.mark.parametrize("name", MODELS)
def test_copies_work(name):
    """fairseq's EMA deep-copies the model and trains on."""
    model = small(name, norm="power", layernorm_embedding=True)
    train(model, [inputs_for(name)], lr=0.01)
    twin = copy.deepcopy(model.eval())
    with torch.no_grad():
        before = model(**inputs_for(name))[0]
    train(model, [inputs_for(name)], lr=0.01)
    with torch.no_grad():
        assert torch.equal(twin(**inputs_for(name))[0], before)
    train(twin, [inputs_for(name)], lr=0.01)


def test_adaptive_softmax_language_model():
    """The wiki103 model, its bands and size made small: trains, and scores what it should."""
    bands = {"adaptive_input_cutoff": "10,20", "adaptive_softmax_cutoff": "10,20", "decoder_layers": 2}
    model = small("transformer_lm_pn_wiki103", norm_warmup_updates=1, **bands)
    tokens = sentences(9, 9, 9)
    for number in range(3):
        model.set_num_updates(number)
        features = model.train()(tokens)[0]
        outputs, targets = model.decoder.adaptive_softmax(features, tokens.reshape(-1))
        losses = [nn.functional.cross_entropy(o, t) for o, t in zip(outputs, targets) if o is not None]
        sum(losses).backward()
    model.eval()
    with torch.no_grad():
        scores = model.get_normalized_probs(model(tokens), log_probs=True, sample={"target": None})
    assert scores.shape == (3, 9, 50)
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(3, 9, dtype=scores.dtype))
    assert float(model.decoder.layers[1].final_layer_norm.updates_tracked) == 3
