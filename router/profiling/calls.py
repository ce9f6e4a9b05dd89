"""Compares the calls of functions that an answer asks for with those that are expected."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema_rs
from pydantic import Field, field_validator, model_validator

from router.policy.profiles import Frozen
from router.profiling.equality import is_same
from router.profiling.model_answer import ToolCall

MAX_ARGUMENTS = 20_000  # characters of a call's arguments; longer ones are wrong
# Whatever arguments hold, reading them raises one of these at most.
BAD_VALUE_ERRORS = (LookupError, ValueError, TypeError, RecursionError, OverflowError)


class ExpectedArgument(Frozen):
    """What an argument may be; in a file also a list of its values alone.

    Attributes:
        values: The right values; numbers are equal as numbers, whether they are written 5 or 5.0.
        json_schema: What the argument must be by JSON schema; with ``values``, both must hold.
        is_optional: Whether the argument may be left out.
        is_exact: Whether texts count only as they are written. Otherwise case, white space and a closing full stop do
            not matter.
    """

    values: tuple[Any, ...] = ()
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    is_optional: bool = Field(default=False, alias="optional")
    is_exact: bool = Field(default=False, alias="exact")

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        if isinstance(value, list):
            return {"values": value}
        return value

    @field_validator("json_schema")
    @classmethod
    def _is_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None:
            # A schema that is none raises a ValueError that says what is wrong.
            jsonschema_rs.validator_for(schema, offline=True)
        return schema

    @model_validator(mode="after")
    def _says_something(self) -> ExpectedArgument:
        if not self.values and self.json_schema is None:
            raise ValueError("values or a schema is needed")
        return self

    def accepts(self, value: Any) -> bool:
        """Tell whether an argument's value is right."""
        if self.json_schema is not None:
            validator = jsonschema_rs.validator_for(self.json_schema, offline=True)
            if not validator.is_valid(value):
                return False
        if not self.values:
            return True
        return any(self._is_equal(value, right_value) for right_value in self.values)

    def _is_equal(self, value: Any, right_value: Any) -> bool:
        if self.is_exact:
            return is_same(value, right_value)
        return is_same(_plain(value), _plain(right_value))


class ExpectedCall(Frozen):
    """A call that is right: of this function, with these arguments and no others."""

    name: str = Field(min_length=1)
    arguments: dict[str, ExpectedArgument] = Field(default={})

    def accepts(self, call: ToolCall) -> bool:
        """Tell whether a call is right; one whose arguments are no JSON object is not."""
        if call.name != self.name or len(call.arguments) > MAX_ARGUMENTS:
            return False
        try:
            values = json.loads(call.arguments)
            return isinstance(values, dict) and self._accepts_values(values)
        except BAD_VALUE_ERRORS:
            return False

    def _accepts_values(self, values: Mapping[str, Any]) -> bool:
        if not values.keys() <= self.arguments.keys():
            return False
        for name, argument in self.arguments.items():
            if name not in values:
                if not argument.is_optional:
                    return False
            elif not argument.accepts(values[name]):
                return False
        return True


def are_right(
    calls: Sequence[ToolCall], expected_calls: Sequence[ExpectedCall]
) -> bool:
    """Tell whether each call is one of those expected, and each of those is called once, in any order."""
    if len(calls) != len(expected_calls):
        return False
    fitting_calls = [_fitting(expected_call, calls) for expected_call in expected_calls]
    return _can_be_paired(fitting_calls)


def _fitting(expected_call: ExpectedCall, calls: Sequence[ToolCall]) -> list[int]:
    """Return the positions of the calls that an expected call accepts."""
    return [number for number, call in enumerate(calls) if expected_call.accepts(call)]


def _can_be_paired(fitting_calls: Sequence[Sequence[int]]) -> bool:
    """Tell whether each expected call can have a fitting call of its own (a matching by augmenting paths, Kuhn 1955)."""
    owner_of_call: dict[int, int] = {}
    return all(
        _find_call(expected_number, fitting_calls, owner_of_call, tried=set())
        for expected_number in range(len(fitting_calls))
    )


def _find_call(
    expected_number: int,
    fitting_calls: Sequence[Sequence[int]],
    owner_of_call: dict[int, int],
    tried: set[int],
) -> bool:
    """Find a fitting call for an expected one, if need be by finding another for the owner of that call."""
    for call_number in fitting_calls[expected_number]:
        if call_number in tried:
            continue
        tried.add(call_number)
        owner = owner_of_call.get(call_number)
        if owner is None or _find_call(owner, fitting_calls, owner_of_call, tried):
            owner_of_call[call_number] = expected_number
            return True
    return False


def _plain(value: Any) -> Any:
    """Return a JSON value whose texts have no case, no more white space than needed and no closing full stop."""
    if isinstance(value, str):
        return " ".join(value.split()).rstrip(".").casefold()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value
