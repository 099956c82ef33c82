"""The README's commands and code are understood as they stand there."""

import re
import shlex

import pytest
import torch
from fairseq import options

from powernorm_fairseq.__main__ import build_parser
from tests.commands import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PARSERS = {
    "fairseq-train": options.get_training_parser,
    "fairseq-generate": options.get_generation_parser,
    "fairseq-eval-lm": options.get_eval_lm_parser,
}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def commands():
    """The README's commands as argument lists; ``...`` stands for more of them."""
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    found = [shlex.split(line.replace(" ...", ""), comments=True) for line in lines if line and line[0] != " "]
    return [command for command in found if command[0] in PARSERS or command[0] == "powernorm_fairseq"]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_command(command):
    program, *arguments = command
    if program == "powernorm_fairseq":
        assert build_parser().parse_args(arguments).command == arguments[0]
        return
    parsed = options.parse_args_and_arch(PARSERS[program](), arguments)
    assert parsed.user_dir == "powernorm_fairseq"
    assert getattr(parsed, "arch", "transformer_").startswith("transformer_")


def test_commands_are_found():
    programs = {command[0] for command in commands()}
    assert programs == {*PARSERS, "powernorm_fairseq"}


def test_python():
    (code,) = blocks("python")
    names = {"x": torch.randn(5, 2, 512), "padding_mask": torch.zeros(2, 5, dtype=torch.bool)}
    exec(code, names)
    assert names["y"].shape == names["x"].shape
    assert names["norm"](names["x"]).shape == names["x"].shape
