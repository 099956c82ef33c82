"""``powernorm_fairseq perplexity``: of a language model's checkpoint on binarised text, by a sliding window.

Every token of the text is scored once, by fairseq-eval-lm. Perplexity is printed per word and per token, which differ
where words are in pieces (--subwords). With --unit character each token is one character or byte, and bits per
character are printed.

--context-window says how many tokens at least are before each token that is scored (fewer only where the text begins),
--stride the same from the other side, how many tokens of each window are scored: together they make up
--tokens-per-sample. The longer the context, the better the figure, and the longer it takes.
"""

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from powernorm_fairseq.checkpoints.average import load_checkpoint
from powernorm_fairseq.corpora.catalogue import CATALOGUE
from powernorm_fairseq.evaluation.perplexity import score_of
from powernorm_fairseq.evaluation.units import SUBWORDS, UNITS, measure, published_tokens
from powernorm_fairseq.evaluation.windows import Window, window_of
from powernorm_fairseq.processes import PACKAGE, UserError, cores, fairseq_program, run_to_end

Say = Callable[[str], None]


def evaluate(
    checkpoint: Path,
    data: Path,
    subset: str,
    window: Window,
    *,
    unit: str = "word",
    subwords: str = "subword_nmt",
    batch_size: Optional[int] = None,
    flags: Tuple[str, ...] = (),
    threads: int = 1,
    log: Optional[Path] = None,
) -> Dict[str, Any]:
    """Perplexity of a checkpoint on one split of binarised text, taken as one stream.

    Args:
        window: how the text is cut.
        unit, subwords: as for ``units``.
        batch_size: windows in a batch, without influence on the result; default: what fits into memory.
        flags: further arguments of fairseq-eval-lm, such as ``--fp16``.
        log: where to keep what fairseq-eval-lm prints, the score of each token among it.

    Returns:
        As ``perplexity.in_units``, and the window, ``checkpoint``, ``subset`` and ``published_tokens`` (None where the
        corpus is none of the catalogue).

    Raises:
        UserError: fairseq-eval-lm failed, or what it scored is not exactly the text.
    """
    text = measure(data, subset, subwords)
    batch_size = batch_size or window.batch_size(dictionary_size(data))
    command: List[str] = [*fairseq_program("eval-lm"), str(data), "--user-dir", str(PACKAGE), "--path", str(checkpoint)]
    options = {
        "--gen-subset": subset,
        "--sample-break-mode": "none",
        "--tokens-per-sample": window.length,
        "--context-window": window.context,
        "--batch-size": batch_size,
        # Forks of fairseq drop what is left over from a multiple of the default, 8.
        "--required-batch-size-multiple": 1,
        # The context is carried from batch to batch by the one process that reads the data.
        "--num-workers": 0,
    }
    command += [str(part) for option in options.items() for part in option]
    with contextlib.ExitStack() as stack:
        if log is None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "eval-lm.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("", encoding="utf-8")
        run_to_end([*command, "--output-word-probs", "--no-progress-bar", *flags], log, threads=threads)
        score = score_of(log.read_text(encoding="utf-8"), text, unit)
    return {
        **score,
        **window.described(),
        "checkpoint": str(checkpoint),
        "subset": subset,
        "published_tokens": published_tokens(data, subset),
    }


def dictionary_size(data: Path) -> int:
    """Symbols in the dictionary of binarised text, without fairseq's own four."""
    with open(data / "dict.txt", encoding="utf-8", newline="\n") as lines:
        return sum(1 for _ in lines)


def trained_with(checkpoint: Path) -> Dict[str, Any]:
    """What a checkpoint says of its training: ``data``, ``tokens_per_sample``, ``longest`` (its last position).

    Raises:
        UserError: it is no language model, or says nothing.
    """
    state = load_checkpoint(checkpoint)
    cfg, args = state.get("cfg"), state.get("args")
    if cfg is None and args is None:
        raise UserError(f"{checkpoint} has no config: neither cfg nor args")
    task, model = (cfg["task"], cfg["model"]) if cfg is not None else (args, args)

    def ask(group: Any, name: str) -> Any:
        return group.get(name) if hasattr(group, "get") else getattr(group, name, None)

    kind = ask(task, "_name") if cfg is not None else ask(task, "task")
    if kind != "language_modeling":
        raise UserError(f"{checkpoint} was trained for {kind}, not for language_modeling")
    length = ask(task, "tokens_per_sample")
    longest = ask(model, "max_target_positions") or ask(task, "max_target_positions") or length
    return {"data": ask(task, "data"), "tokens_per_sample": length, "longest": longest}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--path", type=Path, required=True, metavar="CHECKPOINT", help="checkpoint of fairseq")
    parser.add_argument("--data", type=Path, help="folder of the binarised text (that of the training)")
    parser.add_argument(
        "--subset", nargs="+", default=["test"], metavar="SPLIT", help="what is scored, such as valid test (test)"
    )
    parser.add_argument(
        "--tokens-per-sample", type=int, metavar="N", help="the window, context included (that of the training)"
    )
    parser.add_argument("--context-window", type=int, metavar="N", help="tokens before each block that is scored (0)")
    parser.add_argument("--stride", type=int, metavar="N", help="tokens scored in each window, the rest being context")
    parser.add_argument("--unit", choices=UNITS, default="word", help="what is reported first (%(default)s)")
    parser.add_argument(
        "--subwords",
        choices=SUBWORDS[1:],
        default="subword_nmt",
        help="the pieces that words are counted by; right for whole words too (%(default)s)",
    )
    parser.add_argument(
        "--corpus",
        choices=sorted(name for name, data in CATALOGUE.items() if any("test" in count.of for count in data.counts)),
        help="the data set whose published number of tokens the text must have (what prepare noted)",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="windows in a batch; no influence on the result (what 1 GB holds)"
    )
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    parser.add_argument("--fp16", action="store_true", help="in half precision")
    parser.add_argument("--threads", type=int, default=cores(), help="threads of a CPU (%(default)s)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep the score of each token (one split only)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")


def main(args: argparse.Namespace) -> int:
    """Score what the arguments name."""
    if args.log and len(args.subset) > 1:
        raise UserError("--log holds the scores of one --subset")
    if not args.path.is_file():
        raise UserError(f"no checkpoint {args.path}")
    trained = trained_with(args.path)
    data, length = args.data or Path(str(trained["data"])), args.tokens_per_sample or trained["tokens_per_sample"]
    if not (data / "dict.txt").is_file():
        raise UserError(f"no binarised text in {data}: say with --data where it is")
    if length > trained["longest"]:
        raise UserError(f"the model takes at most {trained['longest']} tokens, not --tokens-per-sample {length}")
    window = window_of(length, args.stride, args.context_window)
    flags = tuple(flag for flag, given in (("--cpu", args.cpu), ("--fp16", args.fp16)) if given)
    results = {}
    for subset in args.subset:
        how = {"unit": args.unit, "subwords": args.subwords, "batch_size": args.batch_size, "flags": flags}
        result = evaluate(args.path, data, subset, window, threads=args.threads, log=args.log, **how)
        if args.corpus:
            result["published_tokens"] = published_tokens(data, subset, args.corpus)
        results[subset] = result
    print(json.dumps(results, indent=1) if args.json else "\n".join(in_words(results)))
    return 0


def in_words(results: Dict[str, Dict[str, Any]]) -> Iterator[str]:
    """Scores of splits of text, and what they are of, in lines."""
    for subset, score in results.items():
        if score["unit"] == "character":
            first = f"{score['bits_per_character']:.4f} bits per character"
            others = f"perplexity {score['perplexity']:.3f} per character"
        else:
            other = "token" if score["unit"] == "word" else "word"
            first = f"perplexity {score['perplexity']:.2f} per {score['unit']}"
            others = f"{score[f'perplexity_per_{other}']:.2f} per {other}"
        yield f"{subset}: {first} ({others})"
        words = f", {score['words']:,} words" if "words" in score else ""
        yield f"  {score['tokens']:,} tokens{words} with ends of line, {score['unknown']:,} unknown"
        yield (
            f"  windows of {score['tokens_per_sample']} tokens, {score['stride']} of them scored,"
            f" {score['context_window']} before them as context"
        )
        known = score["published_tokens"]
        if known == score["tokens"]:
            yield "  the number of tokens is the published one"
        elif known is not None:
            yield f"  WARNING: the published number of tokens is {known:,}: this is another text, do not compare"
