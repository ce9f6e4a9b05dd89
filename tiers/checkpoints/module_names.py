"""Whether a module is among those that a quantization names: by its name, a parent's, a wildcard or a regular expression.

Checkpoints of one model name its modules differently: ``model.layers.0.mlp`` is also ``model.language_model.layers.0.mlp``,
``backbone.layers.0.mlp`` or ``layers.0.ffn``. So names are compared without their first part, and with one word for each
kind of layer.
"""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

REGULAR_EXPRESSION = "re:"
_WRAPPERS = re.compile(
    r"(?:(?:model|language_model|text_model|backbone|transformer)\.)+"
)
# A regular expression may demand the first part of a name.
_POSSIBLE_WRAPPERS = ("model.", "model.language_model.", "language_model.model.", "")
_ALIASES = {
    "attn": "self_attn",
    "ffn": "mlp",
    "feed_forward": "mlp",
    "block_sparse_moe": "mlp",
    "shared_expert": "shared_experts",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "head": "lm_head",
}
_WILDCARDS = frozenset("*?[")
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
# The first expert stands for all of its layer.
_EXPERT_NUMBER = re.compile(r"(?<=\.experts)\.\d+(?=\.|$)")


def canonical_name(name: str) -> str:
    """Return a module's name, or a pattern of names, in the one spelling that is compared."""
    without_wrappers = _WRAPPERS.sub("", name, count=1)
    if not _WRAPPERS.match(name):
        without_wrappers = name
    parts = [_ALIASES.get(part, part) for part in without_wrappers.split(".")]
    return _EXPERT_NUMBER.sub(".0", ".".join(parts))


def parents_of(canonical: str) -> Iterator[str]:
    """Yield a module's name and those of the modules that it is a part of, the nearest first."""
    yield canonical
    while "." in canonical:
        canonical = canonical.rpartition(".")[0]
        yield canonical


def without_layer_numbers(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return patterns for people: one for all layers of which the same is said."""
    return tuple(
        dict.fromkeys(_LAYER_NUMBER.sub(".*", pattern) for pattern in patterns)
    )


class NamePatterns:
    """Patterns of module names, as configurations of checkpoints have them.

    A plain text is a module with all its parts; one that names no layer, such as ``mlp.gate``, is that part of every layer.
    ``*`` stands for any text. What follows ``re:`` is a regular expression, which the beginning of a name has to match.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._names: set[str] = set()
        self._parts: list[str] = []
        self._expressions: list[re.Pattern[str]] = []
        wildcards: list[str] = []
        for pattern in patterns:
            if pattern.startswith(REGULAR_EXPRESSION):
                self._add_expression(pattern.removeprefix(REGULAR_EXPRESSION))
                continue
            canonical = canonical_name(pattern)
            if _WILDCARDS & set(canonical):
                wildcards += [canonical, f"{canonical}.*"]
            elif canonical.startswith("layers."):
                self._names.add(canonical)
            else:
                self._parts.append(f".{canonical}.")
        self._wildcards = re.compile("|".join(map(fnmatch.translate, wildcards)))
        self._has_wildcards = bool(wildcards)

    def __bool__(self) -> bool:
        return bool(
            self._names or self._parts or self._expressions or self._has_wildcards
        )

    def matches(self, name: str) -> bool:
        """Tell whether a module is named, itself or by a module that it is a part of."""
        canonical = canonical_name(name)
        if any(parent in self._names for parent in parents_of(canonical)):
            return True
        if any(part in f".{canonical}." for part in self._parts):
            return True
        if self._has_wildcards and self._wildcards.match(canonical):
            return True
        return any(self._is_expression_of(name, found) for found in self._expressions)

    def _add_expression(self, expression: str) -> None:
        try:
            self._expressions.append(re.compile(expression))
        except re.error:
            # No engine can use it either.
            return

    @staticmethod
    def _is_expression_of(name: str, expression: re.Pattern[str]) -> bool:
        bare_name = _WRAPPERS.sub("", name, count=1) if _WRAPPERS.match(name) else name
        return any(
            expression.match(wrapper + bare_name) for wrapper in _POSSIBLE_WRAPPERS
        )
