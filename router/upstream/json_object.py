"""A JSON object that keeps its text: values can be read, and some of them replaced without touching the others' bytes.

Rendering a decoded body anew would lose what decoding does not keep: the digits of numbers, escapes, repeated keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(rb'[ \t\r\n]*:[ \t\r\n]*("[^"\\]*"|-?[0-9.eE+-]+|true|false|null)')  # after a key
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")
MOST_NESTED = 200  # lists and objects within one another, as the parser of our own bodies (jiter) and vLLM's allow


def read_json(text: bytes | str) -> Any:
    """Return what a JSON text holds; ``ValueError``: it is not JSON.

    The parser keeps up to 16,384 short strings for as long as the process runs (jiter's ``py_string_cache.rs``). Here those
    are keys alone: values are what people ask and engines answer, which fill it over hours, and nobody asks for twice.
    """
    return from_json(text, cache_strings="keys")


class NotJsonError(ValueError):
    """A text is not a JSON object; says why."""


def _no_constants(name: str) -> NoReturn:
    raise NotJsonError(f"{name} is not JSON")


_DECODER = json.JSONDecoder()
_INTEGER: TypeAdapter[int] = TypeAdapter(int)
_BOOLEAN: TypeAdapter[bool] = TypeAdapter(bool)


def as_integer(value: Any) -> int | None:
    """Return a value as vLLM, whose models are lax, would read it where it wants an integer; None where it would refuse."""
    if value is None or type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else _INTEGER.validate_python(value)
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


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an object, with the texts of its key and value."""

    key: str
    value: Any
    key_text: str
    value_text: str


@dataclass(frozen=True)
class JsonObject:
    """A JSON object. Of members that share a key the last counts, as in most decoders.

    It is decoded at once; its members' texts are looked for when something needs them, which most requests do not.
    """

    raw: bytes
    values: Mapping[str, Any]

    @staticmethod
    def parse(body: bytes) -> JsonObject:
        """Read an object; ``NotJsonError``: it is not UTF-8, not JSON, nested too deep, or not an object."""
        try:
            values = from_json(body, allow_inf_nan=False, cache_strings="keys")
        except ValueError:  # why, and lone surrogates, which Python's decoder takes
            values = _decoded(body)
        if not isinstance(values, dict):
            raise NotJsonError("not a JSON object")
        if body.count(b"[") + body.count(b"{") > MOST_NESTED and _nested(values.values()) >= MOST_NESTED:
            raise NotJsonError(f"nested more than {MOST_NESTED} deep")
        return JsonObject(body, values)

    @cached_property
    def members(self) -> tuple[Member, ...]:
        return tuple(_members(self.raw.decode()))

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def text_of(self, key: str) -> str:
        """Return a member's value as it is written; empty where there is none."""
        if key not in self.values:
            return ""
        return next((member.value_text for member in reversed(self.members) if member.key == key), "")

    def edited(self, changes: Mapping[str, Any]) -> bytes:
        """Return the object as JSON with members replaced, added, or, by None, left out; ``bytes`` are JSON already."""
        new = {
            key: value if isinstance(value, bytes) else to_json(value)
            for key, value in changes.items()
            if value is not None
        }
        if (quickly := self._edited_in_place(changes, new)) is not None:
            return quickly
        kept = [f"{m.key_text}:{m.value_text}" for m in self.members if m.key not in changes]
        added = [f"{to_json(key).decode()}:{value.decode()}" for key, value in new.items()]
        return ("{" + ",".join([*kept, *added]) + "}").encode("utf-8", "surrogatepass")

    def _edited_in_place(self, changes: Mapping[str, Any], new: Mapping[str, bytes]) -> bytes | None:
        """Return the edited object where that takes a replaced scalar or two; None where members must be told apart.

        A key that has a member and is written once in the text is written there, unless it is written with escapes.
        """
        raw, added, values = self.raw, [], self.values
        if not values:
            return None
        for key in changes:
            value = new.get(key)
            if key not in values:
                if value is not None:
                    added.append(b",%b:%b" % (to_json(key), value))
                continue
            name = b'"%b"' % key.encode()
            found = _SCALAR.match(raw, raw.find(name) + len(name)) if value is not None else None
            if found is None or value is None or raw.count(name) != 1 or _ESCAPED_LETTER.search(raw):
                return None
            raw = raw[: found.start(1)] + value + raw[found.end() :]
        end = raw.rindex(b"}") if added else len(raw)
        return b"".join((raw[:end], *added, raw[end:]))


def _decoded(body: bytes) -> Any:
    """Return what Python's decoder reads; None for what does not begin as an object."""
    try:
        text = body.decode()
        return json.loads(text, parse_constant=_no_constants) if text[_skip(text, 0) :][:1] == "{" else None
    except UnicodeDecodeError as error:
        raise NotJsonError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise NotJsonError("nested too deep") from None
    except json.JSONDecodeError as error:
        raise NotJsonError(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except NotJsonError:
        raise
    except ValueError as error:  # a number of more digits than Python converts
        raise NotJsonError(str(error)) from None


def _nested(values: Iterable[Any]) -> int:
    """Return how many lists and objects lie within one another in some values, counted without recursion."""
    depth = 0
    while found := [value for value in values if isinstance(value, list | dict)]:
        depth += 1
        values = chain.from_iterable(value.values() if isinstance(value, dict) else value for value in found)
    return depth


def _members(text: str) -> Iterator[Member]:
    """Yield the members of an object that has been decoded before, and so is one."""
    position = _skip(text, _skip(text, 0) + 1)
    while text[position] != "}":
        key, key_end = _DECODER.raw_decode(text, position)
        start = _skip(text, _skip(text, key_end) + 1)
        value, end = _DECODER.raw_decode(text, start)
        yield Member(key, value, text[position:key_end], text[start:end])
        position = _skip(text, end)
        if text[position] == ",":
            position = _skip(text, position + 1)


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()
