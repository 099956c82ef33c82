"""What lies in a folder of binarised text."""

from pathlib import Path
from typing import Any, Optional

import numpy as np

from powernorm_fairseq.processes import UserError

# A file beside it with the name of its data set in the catalogue.
CORPUS = "corpus.txt"


def token_ids(data: Path, split: str) -> "np.ndarray[Any, Any]":
    """All token ids of a split of binarised text, ends of sentence included, in order.

    Raises:
        UserError: there is no such split.
    """
    dataset = _dataset(data, split)
    if dataset is None:
        raise UserError(f"no split {split!r} in {data}")
    return np.concatenate([dataset[index].numpy() for index in range(len(dataset))])


def token_count(data: Path, split: str) -> Optional[int]:
    """The number of them, by the index alone; None if there is no such split."""
    dataset = _dataset(data, split)
    return None if dataset is None else int(dataset.sizes.sum())


def _dataset(data: Path, split: str) -> Any:
    from fairseq.data import data_utils

    return data_utils.load_indexed_dataset(str(data / split), None, None)
