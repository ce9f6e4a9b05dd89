"""A JSON object that keeps its text: values can be read, and some of them replaced without touching the others' bytes.

Rendering a decoded body anew would lose what decoding does not keep: the digits of numbers and escapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, NoReturn

import msgspec
from msgspec import Struct
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from router.upstream.long_data import CutText, cut

# depth of lists and objects that the parser of our own bodies (jiter) and vLLM's allow
MAX_NESTED = 200


def read_json(text: bytes | str) -> Any:
    """Return what a JSON text holds; ``ValueError``: it is not JSON.

    The parser keeps up to 16,384 short strings for as long as the process runs (jiter's ``py_string_cache.rs``). Here those
    are keys alone: values are prompts and answers, which would fill the cache over hours and hardly ever come twice.
    """
    return from_json(text, cache_strings="keys")


class NotJsonError(ValueError):
    """A text is not a JSON object; says why."""


def _no_constants(name: str) -> NoReturn:
    raise NotJsonError(f"{name} is not JSON")


_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_INTEGER: TypeAdapter[int] = TypeAdapter(int)
_BOOLEAN: TypeAdapter[bool] = TypeAdapter(bool)


def as_integer(value: Any) -> int | None:
    """Return a value as vLLM, whose models are lax, would read it where it wants an integer; None where it would refuse."""
    if value is None or type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return _INTEGER.validate_python(value)
    except ValidationError:
        return None


def as_boolean(value: Any) -> bool:
    """Return a value as vLLM would read it where it wants a boolean; False where it would refuse."""
    if value is None or isinstance(value, bool):
        return bool(value)
    try:
        return _BOOLEAN.validate_python(value)
    except ValidationError:
        return False


class _WrittenMembers(Struct, frozen=True):
    """The text of each member of an object, without long data, and what puts that data back."""

    texts: Mapping[str, msgspec.Raw]
    cut_text: CutText


class JsonObject(Struct, frozen=True, dict=True):
    """A JSON object. Of members that share a key the last counts, as in most decoders.

    It is decoded at once; its members' texts are searched only when they are needed.
    """

    raw: bytes
    values: Mapping[str, Any]

    @staticmethod
    def parse(body: bytes) -> JsonObject:
        """Read an object; ``NotJsonError``: it is not UTF-8, not JSON, nested too deep, or not an object."""
        try:
            # It refuses what is nested too deep itself.
            values = from_json(body, allow_inf_nan=False, cache_strings="keys")
        except (
            ValueError
        ):  # Python's decoder takes lone surrogates, and says what is wrong
            values = _decoded(body)
            if isinstance(values, dict) and _nested(values.values()) >= MAX_NESTED:
                raise NotJsonError(f"nested more than {MAX_NESTED} deep") from None
        if not isinstance(values, dict):
            raise NotJsonError("not a JSON object")
        return JsonObject(body, values)

    @cached_property
    def _written(self) -> _WrittenMembers:
        """The members as they are written, searched for once."""
        cut_text = cut(self.raw)
        try:
            texts = _MEMBERS.decode(cut_text.text)
        except msgspec.DecodeError:
            # One holds a lone surrogate, which only Python's decoder takes: they are rendered anew.
            texts = {
                key: msgspec.Raw(json.dumps(value).encode())
                for key, value in self.values.items()
            }
        return _WrittenMembers(texts, cut_text)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def has_any(self, keys: set[str]) -> bool:
        """Tell whether any of these members is set: not null, false, 0 or empty."""
        return not keys.isdisjoint(self.values) and any(map(self.values.get, keys))

    def text_of(self, key: str) -> str:
        written = self._written
        return written.cut_text.put_back(bytes(written.texts.get(key, b""))).decode()

    def edited(self, changes: Mapping[str, Any]) -> bytes:
        """Return the object as JSON with members replaced, added, or, by None, left out; ``bytes`` are JSON already."""
        written = self._written
        members: dict[str, Any] = dict(written.texts)
        for key, value in changes.items():
            members.pop(key, None)
            if value is not None:
                members[key] = msgspec.Raw(value) if isinstance(value, bytes) else value
        try:
            text = msgspec.json.encode(members)
        except UnicodeEncodeError:  # a key has a lone surrogate
            texts = [
                json.dumps(key).encode() + b":" + msgspec.json.encode(value)
                for key, value in members.items()
            ]
            text = b"{%b}" % b",".join(texts)
        return written.cut_text.put_back(text)


def _decoded(body: bytes) -> Any:
    """Return what Python's decoder reads; None for what does not begin as an object."""
    try:
        text = body.decode()
        if not text.lstrip(" \t\r\n").startswith("{"):
            return None
        return json.loads(text, parse_constant=_no_constants)
    except UnicodeDecodeError as error:
        raise NotJsonError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise NotJsonError("nested too deep") from None
    except json.JSONDecodeError as error:
        raise NotJsonError(
            f"{error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except NotJsonError:
        raise
    except ValueError as error:  # a number has more digits than Python converts
        raise NotJsonError(str(error)) from None


def _nested(values: Iterable[Any]) -> int:
    """Return how many lists and objects lie within one another in some values, counted without recursion."""
    depth = 0
    containers = _containers_among(values)
    while containers:
        depth += 1
        children = chain.from_iterable(map(_children_of, containers))
        containers = _containers_among(children)
    return depth


def _containers_among(values: Iterable[Any]) -> list[list[Any] | dict[str, Any]]:
    return [value for value in values if isinstance(value, list | dict)]


def _children_of(container: list[Any] | dict[str, Any]) -> Iterable[Any]:
    if isinstance(container, dict):
        return container.values()
    return container
