"""Normalization layers for fairseq Transformers.

Importing this package mends fairseq where the installed versions need it, registers the models and connects them to
the trainer, so it serves as ``--user-dir``. Without fairseq, ``powernorm_fairseq.norms`` works with torch alone.
"""

from importlib.util import find_spec

from powernorm_fairseq import compat
from powernorm_fairseq.version import __version__

__all__ = ["__version__"]

compat.check_versions()
if find_spec("fairseq") is not None:
    compat.apply()
    import powernorm_fairseq.models  # noqa: F401
    from powernorm_fairseq import trainer

    trainer.apply()
