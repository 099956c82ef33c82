"""How a text longer than a model's window is scored: every token once, each with enough of what comes before it."""

from dataclasses import dataclass
from typing import Any, Dict, Optional

from powernorm_fairseq.processes import UserError

# Numbers (logits) of one batch, at most: 1 GB of them in single precision.
LOGITS = 1 << 28


@dataclass(frozen=True)
class Window:
    """A window that slides over a text.

    The text is cut into blocks of ``stride`` tokens. Each block is scored together with the ``context`` tokens before
    it, or as many as there are, whose own scores are not counted again. The input is the text shifted by one, with
    an end-of-line symbol in front. So every token is predicted from the ``context + 1`` to ``length`` symbols before
    it; near the beginning of the text from all that there are.

    fairseq-eval-lm has this under other names: its ``--tokens-per-sample`` is the length, its ``--context-window`` the
    context.
    """

    length: int
    stride: int

    @property
    def context(self) -> int:
        """Tokens before each block."""
        return self.length - self.stride

    def batch_size(self, dictionary: int) -> int:
        """Windows in a batch so that its logits over a dictionary of that size fit into memory."""
        return max(1, LOGITS // (self.length * dictionary))

    def described(self) -> Dict[str, Any]:
        """As results name it."""
        return {"tokens_per_sample": self.length, "context_window": self.context, "stride": self.stride}


def window_of(length: int, stride: Optional[int] = None, context: Optional[int] = None) -> Window:
    """The window, by its stride or by its context; with neither, blocks without context.

    Raises:
        UserError: a number that cannot be, or stride and context that do not make up the length.
    """
    if length < 1:
        raise UserError(f"a window of {length} tokens; it needs at least 1")
    if stride is None:
        stride = length - (context or 0)
    elif context is not None and stride + context != length:
        raise UserError(
            f"stride {stride} and context {context} do not make up the window of {length} tokens: say one of them, or "
            f"stride {length - context}"
        )
    if not 1 <= stride <= length:
        raise UserError(
            f"a window of {length} tokens can have a stride of 1 to {length}, which is a context of {length - 1} to 0; "
            f"not {stride}"
        )
    return Window(length, stride)
