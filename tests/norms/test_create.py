"""The factory."""

import inspect
import re

import pytest

from powernorm_fairseq import norms
from powernorm_fairseq.norms import NORMS, Norm, create_norm
from tests.commands import ROOT
from tests.norms.helpers import NAMES


def test_the_names_are_those_documented():
    assert list(NORMS) == NAMES
    assert all(issubclass(norm, Norm) and norm.__name__ in norms.__all__ for norm in NORMS.values())


def test_a_name_that_does_not_exist_is_answered_with_those_that_do():
    with pytest.raises(ValueError) as error:
        create_norm("powernorm", 8)
    assert "'powernorm'" in str(error.value) and all(name in str(error.value) for name in NAMES)


def test_one_mapping_of_options_serves_all_norms():
    options = {
        "groups": 4, "alpha_fwd": 0.5, "alpha_bkw": 0.6, "eps": 1e-3, "warmup_updates": 7, "numerics": "released",
        "momentum": 0.2, "cumulative": False, "scale": 2.0, "k": 0.2, "detach": "mean", "affine": False,
        "sync": "batch",
    }  # fmt: skip
    for name in NAMES:
        norm = create_norm(name, 8, options)
        taken = set(inspect.signature(type(norm)).parameters) & set(options)
        assert all(getattr(norm, option) == options[option] for option in taken - {"affine", "cumulative"})
        assert "affine" not in taken or not list(norm.parameters())
    every = set().union(*(inspect.signature(norm).parameters for norm in NORMS.values())) - {"dim"}
    assert every == set(options)


@pytest.mark.parametrize("name", NAMES)
def test_an_option_that_no_norm_knows_is_refused(name):
    with pytest.raises(ValueError, match=r"alpha_forward.*alpha_fwd"):
        create_norm(name, 8, {"alpha_forward": 0.9, "eps": 1e-5})


@pytest.mark.parametrize("name", NAMES)
def test_defaults(name):
    norm = create_norm(name, 8)
    assert norm.dim == 8 and norm.eps == 1e-5
    assert str(create_norm(name, 8, {})) == str(norm) == str(NORMS[name](8))
    with pytest.raises(ValueError, match="dim"):
        create_norm(name, 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_documentation_lists_the_options(name):
    text = (ROOT / "docs" / "norms.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
    options = row.split(" | ")[-2]
    wanted = {key: value.default for key, value in inspect.signature(NORMS[name]).parameters.items() if key != "dim"}
    assert ("eps" in wanted) == (name != "none")
    for option in set(wanted) - {"eps"}:
        assert f"`{option}`" in options
        if option != "affine":
            assert str(wanted[option]).lower() in options
    assert set(re.findall(r"`(\w+)`", options)) == set(wanted) - {"eps"}
