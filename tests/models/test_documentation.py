"""docs/models.md says what the code does."""

import re
from dataclasses import fields

from fairseq.models import MODEL_DATACLASS_REGISTRY

from powernorm_fairseq.models.architectures import LANGUAGE_MODEL_FAMILIES, TRANSLATION_FAMILIES
from powernorm_fairseq.models.config import EncoderDecoderNorms
from powernorm_fairseq.models.placement import DECODER_SITES, ENCODER_SITES, field_of, flag_of
from powernorm_fairseq.norms import NORMS
from tests.commands import ROOT
from tests.models.test_architectures import (
    LANGUAGE_MODEL_DIMS,
    TRANSLATION_DIMS,
    transformer_parameters,
    wikitext_parameters,
)

TEXT = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("|")]


def row(start, width):
    (found,) = [cells for cells in ROWS if cells[0] == start and len(cells) == width]
    return found


def test_sizes():
    for size, (layers, width, inner, heads, count) in TRANSLATION_DIMS.items():
        plain = transformer_parameters(layers, width, inner, 0) + transformer_parameters(layers, width, inner, 0, True)
        dims = [f"{layers}+{layers}", str(width), str(inner), str(heads), f"{count:,}", f"{plain:,}"]
        assert row(f"`{size}`" if size else "(none)", 7)[1:] == dims
    for size, (layers, width, inner, heads, count) in LANGUAGE_MODEL_DIMS.items():
        order = "post-norm" if size == "ptb" else "pre-norm"
        plain = transformer_parameters(layers, width, inner, 0)
        dims = [str(layers), str(width), str(inner), str(heads), order, f"{count:,}", f"{plain:,}"]
        assert row(f"`{size}`" if size else "(none)", 8)[1:] == dims
    assert row("`wiki103`", 8)[-2:] == [f"{wikitext_parameters(norm, words=0):,}" for norm in (2, 0)]


def test_placement():
    sites = {cells[1]: cells for cells in ROWS if len(cells) == 7 and "`--" in cells[1]}
    assert set(sites) == {f"`{flag_of(field_of(site))}`" for site in ENCODER_SITES + DECODER_SITES}
    for site in ENCODER_SITES + DECODER_SITES:
        stack = site.split("_")[0]
        expected = [f"`{TRANSLATION_FAMILIES[family][stack]}`" for family in ("pn", "bn", "adanorm")]
        assert sites[f"`{flag_of(field_of(site))}`"][3:6] == expected
    assert LANGUAGE_MODEL_FAMILIES["pn"]["decoder"] == "power" and LANGUAGE_MODEL_FAMILIES["bn"]["decoder"] == "batch"


def test_every_flag_is_there_with_the_default_of_its_help():
    table = {
        re.findall(r"`(--[a-z-]+)`", cells[0])[0]: cells for cells in ROWS if len(cells) == 3 and "`--" in cells[0]
    }
    own = [item for item in fields(EncoderDecoderNorms) if item.name.startswith("norm_") or item.name == "init"]
    assert {flag_of(item.name) for item in own} | {"--norm", "--encoder-norm-self"} == set(table)
    for item in own:
        stated = re.search(r"default: ([0-9.e-]+)\)", item.metadata["help"])
        if stated:
            assert stated[1] == table[flag_of(item.name)][1].strip("`"), item.name


def test_every_norm_and_model_is_there():
    assert all(f"`{name}`" in TEXT for name in NORMS)
    families = {f"`{name.rsplit('_tiny')[0]}`" for name in MODEL_DATACLASS_REGISTRY if name.endswith("_tiny")}
    ours = {name for name in families if name.startswith(("`transformer_lm_", "`transformer_"))} - {"`transformer`"}
    assert len(ours) == 8
    assert all(name in TEXT for name in ours)
