"""Commands and code in README and docs are understood as they stand there, and tests named there exist."""

import re
import shlex

import pytest
import torch
from fairseq import options

from powernorm_fairseq.__main__ import build_parser
from tests.commands import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PATHS = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / "results").glob("README.md")]
DOCUMENTS = [README, *(path.read_text(encoding="utf-8") for path in PATHS)]
PARSERS = {
    "fairseq-train": options.get_training_parser,
    "fairseq-generate": options.get_generation_parser,
    "fairseq-eval-lm": options.get_eval_lm_parser,
}


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands():
    """All commands as argument lists; ``...`` stands for more of them."""
    lines = "\n".join(block for text in DOCUMENTS for block in blocks(text, "sh")).replace("\\\n", " ").splitlines()
    found = [
        shlex.split(re.sub(r" \.\.\.| > \S+", "", line), comments=True) for line in lines if line and line[0] != " "
    ]
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
    (code,) = blocks(README, "python")
    names = {"x": torch.randn(5, 2, 512), "padding_mask": torch.zeros(2, 5, dtype=torch.bool)}
    exec(code, names)
    assert names["y"].shape == names["x"].shape
    assert names["norm"](names["x"]).shape == names["x"].shape


def test_every_trap_has_a_test_that_names_it():
    traps = (ROOT / "docs" / "traps.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in traps.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 22))
    for row in rows:
        references = re.findall(r"`(tests/[^`:]+)(?:::(\w+))?`", row[-1])
        assert references
        for path, function in references:
            text = (ROOT / path).read_text(encoding="utf-8")
            if function:
                text = re.search(rf"^def {function}\(.*?^    \"\"\"(.*?)\"\"\"", text, re.MULTILINE | re.DOTALL)[1]
            assert re.search(rf"Traps? [^:.]*\b{int(row[0])}\b", text), (row[0], path, function)


def test_links_lead_somewhere():
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), (path.name, target)
