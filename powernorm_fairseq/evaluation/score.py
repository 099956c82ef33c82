"""``powernorm_fairseq score``: BLEU and chrF of translations, in the ways that published figures are computed.

The kinds of BLEU are not comparable with one another; each result says which one it is.

tokenised: the tokens as they are, without smoothing, as fairseq-generate and multi-bleu.perl print it; the IWSLT14
figures of the PowerNorm and AdaNorm papers, there on lower-cased text.

compound: the same after splitting hyphens inside words into ##AT##-##AT##; the WMT14 English-German figures.

sacrebleu: text as people write it, against references that nobody has tokenised; what to publish today.

With several files of hypotheses --compare also tests whether they differ from the first by more than chance.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from powernorm_fairseq.corpora.text import detokenise
from powernorm_fairseq.corpora.translation import read_lines
from powernorm_fairseq.evaluation import generated
from powernorm_fairseq.evaluation.checks import check_detokenised, naming
from powernorm_fairseq.processes import UserError

LABELS = {
    "tokenised": "tokenised BLEU, no smoothing",
    "compound": "tokenised BLEU, compounds split, no smoothing",
    "sacrebleu": "detokenised sacreBLEU",
}

# Name and hypotheses of each system, and the references of all.
Texts = Tuple[List[Tuple[str, List[str]]], List[str]]


def score(
    systems: Sequence[Tuple[str, Sequence[str]]],
    references: Sequence[str],
    kind: str,
    *,
    language: str = "de",
    lowercase: bool = False,
    chrf: bool = False,
) -> Dict[str, Any]:
    """The scores of each system, labelled.

    Args:
        systems: names and hypotheses.
        kind: a key of ``LABELS``.
        language: that compounds are split in.
        chrf: chrF2 as well.

    Returns:
        ``kind``, ``label``, ``lowercase``, ``preparation`` (what was done to both sides before sacreBLEU saw them), and
        ``systems`` with ``name``, ``bleu`` and perhaps ``chrf``: what ``sacrebleu_score`` and ``chrf_score`` return.

    Raises:
        UserError: what ``check_pairs`` refuses, with the name of the system.
    """
    from powernorm_fairseq.evaluation import bleu

    scored = []
    for name, hypotheses in systems:
        with naming(name):
            if kind == "compound":
                found = bleu.compound_bleu(hypotheses, references, lowercase, language=language)
            else:
                one = {"tokenised": bleu.tokenised_bleu, "sacrebleu": bleu.sacrebleu_score}[kind]
                found = one(hypotheses, references, lowercase)
            scored.append({"name": name, "bleu": found})
            if chrf:
                scored[-1]["chrf"] = bleu.chrf_score(hypotheses, references, lowercase)
    return {
        "kind": kind,
        "label": LABELS[kind],
        "lowercase": lowercase,
        "preparation": _preparation(language) if kind == "compound" else None,
        "systems": scored,
    }


def compare(
    systems: Sequence[Tuple[str, Sequence[str]]],
    references: Sequence[str],
    kind: str,
    *,
    language: str = "de",
    lowercase: bool = False,
    chrf: bool = False,
    **numbers: int,
) -> Dict[str, Any]:
    """``significance.compare`` by the metrics that ``score`` would compute from the same arguments."""
    from sacrebleu.metrics import BLEU, CHRF
    from sacrebleu.metrics.base import Metric

    from powernorm_fairseq.evaluation import significance
    from powernorm_fairseq.evaluation.bleu import plain_metric, split_compounds

    bleu = BLEU(lowercase=lowercase) if kind == "sacrebleu" else plain_metric(lowercase)
    metrics: Dict[str, Metric] = {"BLEU": bleu}
    if chrf:
        metrics["chrF2"] = CHRF(lowercase=lowercase)
    if kind == "compound":
        systems = [(name, split_compounds(hypotheses, language)) for name, hypotheses in systems]
        references = split_compounds(references, language)
    return significance.compare(systems, references, metrics, **numbers)


def in_words(result: Dict[str, Any]) -> str:
    """Scores as text to be printed."""
    case = "case ignored" if result["lowercase"] else "case counts"
    lines = [f"{result['label']}, {case}" + (f" ({result['preparation']})" if result["preparation"] else "")]
    for system in result["systems"]:
        found = system["bleu"]
        precisions = "/".join(f"{precision:.1f}" for precision in found["precisions"])
        lines.append(
            f"{system['name']}: BLEU {found['bleu']:.2f}, {precisions}, "
            f"brevity penalty {found['brevity_penalty']:.3f} ({found['hypothesis_length']} tokens for "
            f"{found['reference_length']}), {found['sentences']} lines"
        )
        if "chrf" in system:
            lines.append(f"{system['name']}: chrF2 {system['chrf']['chrf']:.2f}")
    for metric in ("bleu", "chrf"):
        if metric in result["systems"][0]:
            lines.append(f"signature: {result['systems'][0][metric]['signature']}")
    return "\n".join(lines)


def _preparation(language: str) -> str:
    import sacremoses

    return f"sacremoses {sacremoses.__version__}, {language}, hyphens as ##AT##-##AT##"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--hypotheses", type=Path, nargs="+", metavar="FILE", help="one translation a line, best ones")
    texts.add_argument(
        "--generated", type=Path, nargs="+", metavar="FILE", help="what fairseq-generate printed, instead of hypotheses"
    )
    parser.add_argument(
        "--references", type=Path, metavar="FILE", help="one a line; can be left out where --generated has them"
    )
    parser.add_argument("--kind", choices=LABELS, required=True, help="which BLEU")
    parser.add_argument("--language", help="of the translations, for compound (de) and --detokenise")
    parser.add_argument("--detokenise", action="store_true", help="first join Moses tokens of the hypotheses to text")
    parser.add_argument("--lowercase", action="store_true", help="ignore case")
    parser.add_argument("--chrf", action="store_true", help="chrF2 as well (with sacrebleu)")
    parser.add_argument("--compare", action="store_true", help="test the difference of each system from the first one")
    parser.add_argument("--resamples", type=int, default=1000, help="of the paired bootstrap (%(default)s)")
    parser.add_argument("--trials", type=int, default=10_000, help="of the approximate randomisation (%(default)s)")
    parser.add_argument("--seed", type=int, default=12_345, help="of both tests (%(default)s, sacreBLEU's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")


def main(args: argparse.Namespace) -> int:
    """Score what the arguments name."""
    if args.kind != "sacrebleu" and (args.chrf or args.detokenise):
        raise UserError(f"{'--chrf' if args.chrf else '--detokenise'} is for text as people write it: --kind sacrebleu")
    if args.detokenise and not args.language:
        raise UserError("--detokenise needs --language, such as en")
    if args.compare and len(args.hypotheses or args.generated) < 2:
        raise UserError("--compare needs two files of hypotheses or more; the first one is what the others differ from")
    systems, references = _texts(args)
    if args.detokenise:
        systems = [(name, detokenise(hypotheses, args.language)) for name, hypotheses in systems]
    if args.kind == "sacrebleu":
        for name, hypotheses in systems:
            with naming(name):
                check_detokenised(hypotheses, references)
    how = {"language": args.language or "de", "lowercase": args.lowercase, "chrf": args.chrf}
    result = score(systems, references, args.kind, **how)
    if args.compare:
        numbers = {"resamples": args.resamples, "trials": args.trials, "seed": args.seed}
        result["comparison"] = compare(systems, references, args.kind, **how, **numbers)
    if args.json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
        return 0
    print(in_words(result))
    if args.compare:
        from powernorm_fairseq.evaluation.significance import in_words as comparison_in_words

        print("\n" + comparison_in_words(result["comparison"]))
    return 0


def _texts(args: argparse.Namespace) -> Texts:
    """The texts that the arguments name."""
    references = _read(args.references) if args.references else None
    if args.hypotheses:
        if references is None:
            raise UserError("--hypotheses need --references")
        return [(str(path), _read(path)) for path in args.hypotheses], references
    outputs = [(str(path), "\n".join(_read(path))) for path in args.generated]
    if references is None:
        references = _printed_references(outputs, args.kind)
    systems = []
    for name, output in outputs:
        with naming(name):
            systems.append((name, generated.hypotheses_of(output, len(references))))
    return systems, references


def _printed_references(outputs: Sequence[Tuple[str, str]], kind: str) -> List[str]:
    """The references in fairseq-generate's output, which all outputs must share."""
    if kind == "sacrebleu":
        raise UserError(
            "the references that fairseq-generate prints are tokens, and for this kind they must be as people wrote "
            "them: give --references"
        )
    found: Optional[List[str]] = None
    for name, output in outputs:
        printed = generated.references_of(output)
        if printed is None:
            raise UserError(f"{name} has no references (T- lines): give --references")
        if found is not None and printed != found:
            raise UserError(f"{name} has other references than {outputs[0][0]}, so their scores cannot be compared")
        found = printed
    assert found is not None
    if kind == "compound" and any("<<unk>>" in line for line in found):
        raise UserError("the references that fairseq-generate printed lack words (<<unk>>): give --references")
    return found


def _read(path: Path) -> List[str]:
    try:
        lines = read_lines(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}") from None
    if not lines:
        raise UserError(f"{path} is empty")
    return lines
