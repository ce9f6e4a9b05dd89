"""A second look at a prompt that may or may not have code: a small transformer, fine-tuned on the same prompts.

It knows more of language than the first look, which takes a tenth of a millisecond; this takes two to ten. It needs
onnxruntime, which ``qarr[second-look]`` installs. ``scripts/train_second_look.py`` makes its files.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from classifier.errors import WeightsError
from classifier.model import OUTPUTS, SMALL_TALK

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = Path(__file__).parent
MODEL, TOKENIZER = "second_look.onnx", "second_look_tokenizer.json"
TOKENS = 128  # read at most
# Its own outputs, in order. It was trained before small talk was told apart, and it is asked only where code is in doubt: to
# the log-odds of small talk it adds 0.
KNOWN_OUTPUTS = tuple(output for output in OUTPUTS if output != OUTPUTS[SMALL_TALK])
WEIGHT = 0.5  # of its log-odds beside those of the first look: best on prompts left out of both trainings
HEAD_CHARS, TAIL_CHARS = 330, 170  # of a text that is longer


class SecondLook:
    """The model. Safe to share between threads; other threads run while it computes."""

    __slots__ = ("_session", "_tokenizer")

    def __init__(self, session: Any, tokenizer: Tokenizer) -> None:
        self._session, self._tokenizer = session, tokenizer

    def read(self, text: str) -> Sequence[float]:
        """Return what it adds to the log-odds of each of ``OUTPUTS``, 0 where it knows nothing. ``text``: any string."""
        import numpy as np  # noqa: PLC0415  onnxruntime brings it

        ids = np.array([self._tokenizer.encode(excerpt(text)).ids], np.int64)
        odds = self._session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0][0]
        known = dict(zip(KNOWN_OUTPUTS, (WEIGHT * odds).tolist(), strict=True))
        return [known.get(output, 0.0) for output in OUTPUTS]


def excerpt(text: str) -> str:
    """Return what is read of a text: all of a short one, head and tail of a long one."""
    if len(text) > HEAD_CHARS + TAIL_CHARS:
        text = f"{text[:HEAD_CHARS]} ... {text[-TAIL_CHARS:]}"
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@cache
def load_second_look(folder: Path = FOLDER) -> SecondLook | None:
    """Read the model; None where onnxruntime is not installed.

    Raises:
        WeightsError: Its files are missing or do not fit this code.
    """
    try:
        import onnxruntime  # noqa: PLC0415
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(folder / MODEL, options, providers=["CPUExecutionProvider"])
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # both raise bare ones
        raise WeightsError(f"cannot read the classifier's second look in {folder}: {error}") from error
    if session.get_outputs()[0].shape[-1] != len(KNOWN_OUTPUTS):
        raise WeightsError(f"{folder / MODEL} has other outputs than this code: run scripts/train_second_look.py")
    tokenizer.enable_truncation(TOKENS)
    tokenizer.no_padding()
    return SecondLook(session, tokenizer)
