"""A second look at a prompt that may or may not have code: a small transformer, fine-tuned on the same prompts.

It knows more of language than the first look, which takes a tenth of a millisecond; this takes two to ten. Its library,
onnxruntime, is loaded only here. ``scripts/train_second_look.py`` makes its files.
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
MODEL = "second_look.onnx"
TOKENIZER = "second_look_tokenizer.json"
MAX_TOKENS = 128
# The model's outputs, in order. It was trained before small talk was told apart, and is asked only where code is in doubt:
# it adds 0 to the log-odds of small talk.
KNOWN_OUTPUTS = tuple(output for output in OUTPUTS if output != OUTPUTS[SMALL_TALK])
# Its log-odds are added with this weight to those of the first look: the best on prompts left out of both trainings.
WEIGHT = 0.5
# The beginning and the end of a longer text are read, and nothing between them.
HEAD_CHARS = 330
TAIL_CHARS = 170


class SecondLook:
    """The model. Safe to share between threads; other threads run while it computes."""

    __slots__ = ("_session", "_tokenizer")

    def __init__(self, session: Any, tokenizer: Tokenizer) -> None:
        self._session = session
        self._tokenizer = tokenizer

    def read(self, text: str) -> Sequence[float]:
        """Return what a second look at any string adds to the log-odds of each of ``OUTPUTS``, 0 where it knows nothing."""
        import numpy as np  # noqa: PLC0415  onnxruntime brings it

        token_ids = np.array([self._tokenizer.encode(excerpt(text)).ids], np.int64)
        inputs = {"input_ids": token_ids, "attention_mask": np.ones_like(token_ids)}
        log_odds = self._session.run(None, inputs)[0][0]
        added = dict(zip(KNOWN_OUTPUTS, (WEIGHT * log_odds).tolist(), strict=True))
        return [added.get(output, 0.0) for output in OUTPUTS]


def excerpt(text: str) -> str:
    """Return the part of a text that is read: all of a short one, the beginning and the end of a long one."""
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
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(
            folder / MODEL, options, providers=["CPUExecutionProvider"]
        )
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # Both libraries raise bare exceptions.
        raise WeightsError(
            f"cannot read the classifier's second look in {folder}: {error}"
        ) from error
    if session.get_outputs()[0].shape[-1] != len(KNOWN_OUTPUTS):
        raise WeightsError(
            f"{folder / MODEL} has other outputs than this code: run scripts/train_second_look.py"
        )
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.no_padding()
    return SecondLook(session, tokenizer)
