"""fairseq-eval-lm in the tests' own process."""

import logging

import pytest

from powernorm_fairseq.evaluation import language_model
from powernorm_fairseq.experiment import run
from tests.commands import in_this_process


@pytest.fixture
def programs_here(monkeypatch):
    """fairseq-eval-lm in this process, which saves its start; tests/experiment has the real one."""

    def here(command, log, **options):
        logger = logging.getLogger("fairseq_cli.eval_lm")
        handler = logging.FileHandler(log, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s"))
        logger.addHandler(handler)
        monkeypatch.setattr(logger, "level", logging.INFO)
        try:
            in_this_process("fairseq-eval-lm", *command[1:])
        finally:
            logger.removeHandler(handler)
            handler.close()

    for module in (run, language_model):
        monkeypatch.setattr(module, "run_to_end", here)
