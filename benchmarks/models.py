"""The project's registered models, built without data, for measurements of whole models."""

from argparse import Namespace
from typing import Any, Dict, Tuple

import torch
from torch import Tensor, nn

import powernorm_fairseq.models  # noqa: F401

SIZE = "iwslt_de_en"  # 6 + 6 layers of 512 channels, feed-forward networks of 1024
WORDS = 10_000


def config(arch: str, *flags: str) -> Any:
    """The configuration of ``fairseq-train --arch ARCH FLAGS``."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = options.get_training_parser()
    argv = ["DATA", "--task", "translation", "--arch", arch, "--optimizer", "adam", "--max-tokens", "4096", *flags]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, argv))


def dictionary(words: int) -> Any:
    """A dictionary of so many entries."""
    from fairseq.data import Dictionary

    made = Dictionary()
    for number in range(words - len(made)):
        made.add_symbol(f"word{number}")
    return made


def build(cfg: Any, words: Any, seed: int = 1) -> nn.Module:
    """The model of a configuration with one dictionary for both languages."""
    from fairseq import models

    torch.manual_seed(seed)
    return models.build_model(cfg.model, Namespace(source_dictionary=words, target_dictionary=words))


def batch(tokens: int, length: int, words: int) -> Tuple[Dict[str, Tensor], Tensor]:
    """A batch of about ``tokens`` target tokens, a tenth of the positions padding: network input and target."""
    generator = torch.Generator().manual_seed(1)
    sentences = max(1, round(tokens / (0.9 * length)))
    lengths = torch.linspace(0.8 * length, length, sentences).round().long()
    text = torch.randint(4, words, (2, sentences, length), generator=generator)
    positions = torch.arange(length)
    source = text[0].masked_fill(positions < length - lengths.unsqueeze(1), 1)
    target = text[1].masked_fill(positions >= lengths.unsqueeze(1), 1)
    previous = torch.cat([torch.full((sentences, 1), 2), target[:, :-1]], 1)
    net_input = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": previous}
    return net_input, target


def loss_of(model: nn.Module, net_input: Dict[str, Tensor], target: Tensor) -> Tensor:
    """Label-smoothed cross entropy, summed over the real tokens, as fairseq's criterion has it."""
    from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss

    probabilities = model.get_normalized_probs(model(**net_input), log_probs=True)  # type: ignore[operator]
    loss, _ = label_smoothed_nll_loss(
        probabilities.view(-1, probabilities.size(-1)), target.view(-1), epsilon=0.1, ignore_index=1
    )
    return loss
