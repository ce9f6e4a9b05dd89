"""Calls of functions: what is right, what is wrong, and arguments that try to raise or hang."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from router.profiling.checks import Check
from router.profiling.model_answer import ModelAnswer, ToolCall

READ = TypeAdapter[Any](Check)


def answer(*calls: tuple[str, Any], text: str = "") -> ModelAnswer:
    """Return an answer with calls, each a name and its arguments as a value or as JSON text."""
    tool_calls = []
    for name, arguments in calls:
        is_text = isinstance(arguments, str)
        arguments_text = arguments if is_text else json.dumps(arguments)
        tool_calls.append(ToolCall(name=name, arguments=arguments_text))
    return ModelAnswer(text=text, tool_calls=tuple(tool_calls))


def expect(*calls: tuple[str, dict[str, Any]]) -> Any:
    """Return a check that expects calls, each a name and what its arguments may be."""
    expected = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return READ.validate_python({"type": "calls", "calls": expected})


WEATHER = expect(
    ("get_weather", {
        "city": ["Paris", "Paris, France"],
        "days": [3],
        "unit": {"values": ["celsius"], "optional": True, "exact": True},
    })
)  # fmt: skip
RIGHT = {"city": "Paris", "days": 3}


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        (RIGHT, True),
        ({"days": 3.0, "city": " paris,  FRANCE. "}, True),
        ({**RIGHT, "unit": "celsius"}, True),
        ('{"city": "\\u0050aris", "days": 3e0}', True),
        ({**RIGHT, "unit": "Celsius"}, False),
        ({**RIGHT, "unit": None}, False),
        ({**RIGHT, "days": "3"}, False),
        ({**RIGHT, "days": True}, False),
        ({**RIGHT, "days": [3]}, False),
        ({**RIGHT, "place": "Paris"}, False),
        ({**RIGHT, "city": "London"}, False),
        ({"city": "Paris"}, False),
        ([RIGHT], False),
        ("", False),
        ('{"city": "Paris", "days": 3', False),
        ("{'city': 'Paris', 'days': 3}", False),
        ('"{\\"city\\": \\"Paris\\", \\"days\\": 3}"', False),
    ],
)
def test_arguments_are_judged_by_value(arguments: Any, *, is_right: bool) -> None:
    assert WEATHER.passes(answer(("get_weather", arguments))) is is_right


def test_the_right_function_is_called_once_whatever_is_said_beside_it() -> None:
    assert WEATHER.passes(answer(("get_weather", RIGHT), text="I will look."))
    assert not WEATHER.passes(answer(("get_forecast", RIGHT)))
    assert not WEATHER.passes(answer(("get_weather", RIGHT), ("get_weather", RIGHT)))
    assert not WEATHER.passes(ModelAnswer(text=json.dumps(RIGHT)))


def test_nested_arguments_are_compared_all_the_way_down() -> None:
    wanted = {
        "to": {"name": "Ann Lee", "zip": "0150"},
        "items": [{"sku": "A1", "count": 2}],
    }
    check = expect(("order", {"order": {"values": [wanted], "exact": True}}))
    assert check.passes(answer(("order", {"order": wanted})))
    for spoiled in (
        {**wanted, "items": [{"sku": "a1", "count": 2}]},
        {**wanted, "items": [{"sku": "A1", "count": 3}]},
        {**wanted, "items": []},
        {"items": wanted["items"]},
        {**wanted, "note": ""},
    ):  # fmt: skip
        assert not check.passes(answer(("order", {"order": spoiled})))


def test_an_argument_may_be_told_by_its_schema() -> None:
    schema = {"type": "string", "minLength": 3}
    check = expect(("note", {"text": {"schema": schema}, "tags": {"schema": {"maxItems": 1}, "values": [["a"], ["a", "b"]]}}))  # fmt: skip
    assert check.passes(answer(("note", {"text": "any words", "tags": ["a"]})))
    assert not check.passes(answer(("note", {"text": "no", "tags": ["a"]})))
    assert not check.passes(answer(("note", {"text": "any words", "tags": ["a", "b"]})))


def test_the_order_of_parallel_calls_is_free() -> None:
    check = expect(("add", {"city": ["Oslo"]}), ("add", {"city": ["Rome", "Oslo"]}))
    oslo = ("add", {"city": "Oslo"})
    rome = ("add", {"city": "Rome"})
    assert check.passes(answer(oslo, rome))
    assert check.passes(answer(rome, oslo))
    assert check.passes(answer(oslo, oslo))
    assert not check.passes(answer(rome, rome))
    assert not check.passes(answer(oslo))
    assert not check.passes(answer(oslo, rome, rome))


def test_many_calls_that_cannot_be_paired_do_not_hang() -> None:
    """Every order of 40 calls would take longer than the universe is old."""
    check = expect(*[("add", {"city": ["Oslo"]})] * 40)
    calls = [("add", {"city": "Oslo"})] * 39
    assert not check.passes(answer(*calls, ("add", {"city": "Rome"})))
    assert check.passes(answer(*calls, ("add", {"city": "Oslo"})))


def test_where_no_call_is_right_the_text_is_checked() -> None:
    text_check = {"type": "contains", "any": ["4 °C", "4 degrees"]}
    check = READ.validate_python({"type": "calls", "calls": [], "text": text_check})
    assert check.passes(answer(text="It is 4 degrees there."))
    assert not check.passes(answer(text="It is cold there."))
    assert not check.passes(answer(("get_weather", {}), text="It is 4 degrees."))
    any_text = READ.validate_python({"type": "calls", "calls": []})
    assert any_text.passes(answer(text="Hello!"))
    assert not any_text.passes(answer(text=" "))
    assert not any_text.passes(answer(("get_weather", {}), text="Hello!"))


NASTY = (
    "[" * 100_000, '{"city":' * 5000, '{"city": ' + "9" * 5000 + "}", '{"city": 1e999, "days": NaN}', '{"city": "\\ud800", "days": 3}',
    '{"days": ' + "9" * 400 + ', "city": "Paris"}', '{"city": "Paris", "days": -Infinity}', "\x00", "\ud800", '{"": 1}', "null", "x" * 30_000,
    '{"city": "Paris", "days": ' + "[" * 900 + "]" * 900 + "}", '{"city": ' + "[" * 900 + '"Paris"' + "]" * 900 + ', "days": 3}',
)  # fmt: skip


@pytest.mark.parametrize("arguments", NASTY, ids=range(len(NASTY)))
def test_no_arguments_raise(arguments: str) -> None:
    by_schema = expect(("get_weather", {"city": {"schema": {"pattern": "^(a+)+$"}}, "days": {"schema": {}}}))  # fmt: skip
    assert not WEATHER.passes(answer(("get_weather", arguments)))
    assert isinstance(by_schema.passes(answer(("get_weather", arguments))), bool)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))  # fmt: skip
def test_no_value_raises(value: Any) -> None:
    """What holds no days at all is never right."""
    arguments = json.dumps({"city": value})
    assert not WEATHER.passes(answer(("get_weather", arguments)))


@pytest.mark.parametrize(
    "check",
    [
        {"type": "calls"},
        {"type": "calls", "calls": [{"name": ""}]},
        {"type": "calls", "calls": [{"name": "f", "arguments": {"a": []}}]},
        {"type": "calls", "calls": [{"name": "f", "arguments": {"a": {"schema": {"type": "text"}}}}]},
        {"type": "calls", "calls": [{"name": "f"}], "text": {"type": "exact", "values": ["a"]}},
        {"type": "calls", "calls": [], "text": {"type": "calls", "calls": []}},
        {"type": "calls", "calls": [], "text": {"type": "runs", "test": "a"}},
    ],
)  # fmt: skip
def test_checks_that_could_never_tell_are_refused(check: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        READ.validate_python(check)
