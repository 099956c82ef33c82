"""Curves of the validation loss."""

import math
import struct

import pytest

from powernorm_fairseq.experiment.log import Validation
from powernorm_fairseq.report import curves

HISTORY = [Validation(100, 9.0, 8.5), Validation(200, 6.0, 5.5), Validation(300, 5.0, 4.5)]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw))[1])
    return figures


def test_a_panel_a_task_a_line_a_norm(tmp_path, drawn):
    data = {"perplexity": {"layer": HISTORY}, "bleu": {"layer": HISTORY, "power": HISTORY[:2], "detach": HISTORY}}
    curves.draw(data, tmp_path / "curves.png")
    translation, language_model = drawn[0].axes
    assert (translation.get_title(), language_model.get_title()) == ("Translation", "Language model")
    assert translation.get_xlabel() == "Updates"
    assert "Validation loss" in translation.get_ylabel() and "nats per BPE token" in translation.get_ylabel()
    assert [text.get_text() for text in translation.get_legend().get_texts()] == [
        "LayerNorm",
        "PowerNorm",
        "DetachNorm",
    ]
    line = translation.get_lines()[0]
    assert list(line.get_xdata()) == [100, 200, 300]
    assert list(line.get_ydata()) == pytest.approx([one.nll * math.log(2) for one in HISTORY])
    content = (tmp_path / "curves.png").read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(b"\x89PNG") and width > 1000 and height > 400
    assert not list(tmp_path.glob("*.partial"))


def test_a_norm_keeps_its_colour(tmp_path, drawn):
    for norms in (["layer", "power"], ["power"]):
        curves.draw({"bleu": {norm: HISTORY for norm in norms}}, tmp_path / "curves.png")
    colours = [axes.get_lines()[-1].get_color() for figure in drawn for axes in figure.axes]
    assert colours[0] == colours[1]


def test_nothing_to_draw_is_still_a_picture(tmp_path):
    curves.draw({}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
