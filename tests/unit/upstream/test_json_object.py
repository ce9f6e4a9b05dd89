"""Objects that keep their text: what is read, what is refused and why, and what an edit leaves alone."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.upstream.json_object import (
    MAX_NESTED,
    JsonObject,
    NotJsonError,
    as_boolean,
    as_integer,
    read_json,
)

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=5)


@given(OBJECTS, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_any_object_is_read_as_json_reads_it(
    value: dict[str, Any],
    indent: int | str | None,
    ascii_only: bool,  # noqa: FBT001
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    try:
        body = text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 has no bytes for
        return
    found = JsonObject.parse(body)
    assert found.values == value
    assert json.loads(found.edited({})) == value


@given(OBJECTS, st.text(), VALUES)
def test_an_edit_changes_one_member(value: dict[str, Any], key: str, new: Any) -> None:
    edited = JsonObject.parse(json.dumps(value).encode()).edited(
        {key: json.dumps(new).encode()}
    )
    assert json.loads(edited) == {**value, key: new}


def test_an_edit_leaves_the_bytes_of_others_alone() -> None:
    """Digits and escapes, which decoding and encoding again would lose."""
    text = r'{ "a" : 1.000, "b":"\u0041\/", "c": 1e2, "d" :[ 1 , 2 ], "a": 0.10, "drop": {} }'
    edited = JsonObject.parse(text.encode()).edited(
        {"drop": None, "c": 3, "e": b'{"raw":1.0}'}
    )
    assert edited == rb'{"a":0.10,"b":"\u0041\/","d":[ 1 , 2 ],"c":3,"e":{"raw":1.0}}'


def test_of_members_that_share_a_key_the_last_counts() -> None:
    found = JsonObject.parse(b'{"a": 1, "b": 2, "a": [3]}')
    assert found.get("a") == [3]
    assert found.text_of("a") == "[3]"
    assert found.get("c") is None
    assert found.get("c", 4) == 4
    assert found.text_of("c") == ""
    assert found.edited({"a": 5}) == b'{"b":2,"a":5}'


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b'"a"', "not a JSON object"),
        (b"{", "line 1 column 2"),
        (b'{"a"}', "Expecting ':' delimiter"),
        (b'{"a": }', "Expecting value"),
        (b'{"a": 1,}', "line 1 column 9"),
        (b'{"a": 1 "b": 2}', "Expecting ',' delimiter"),
        (b"{1: 2}", "double quotes"),
        (b'{"a": 1}\n{', "Extra data at line 2 column 1"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": [-Infinity]}', "-Infinity is not JSON"),
        (b'{"a": "\xff"}', "not UTF-8: invalid start byte at byte 7"),
        (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
        (b'{"a":' + b"[" * 100_000, "nested too deep"),
    ],
)
def test_what_is_no_object_is_refused_with_the_reason(body: bytes, why: str) -> None:
    with pytest.raises(NotJsonError, match=re.escape(why)):
        JsonObject.parse(body)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_depth_is_bounded(opening: str, closing: str) -> None:
    def nested(depth: int) -> bytes:
        inner = depth - 1  # the object itself is one
        return f'{{"x":{opening * inner}{"1" if inner else "[]"}{closing * inner}}}'.encode()

    assert JsonObject.parse(nested(MAX_NESTED)).text_of("x")
    with pytest.raises(NotJsonError, match="nested more than 200 deep"):
        JsonObject.parse(nested(MAX_NESTED + 1))


def test_many_brackets_side_by_side_are_not_deep() -> None:
    assert JsonObject.parse(b'{"a":[' + b",".join([b"[]"] * 1000) + b"]}").text_of("a")


@pytest.mark.parametrize(
    ("value", "integer", "boolean"),
    [
        (3, 3, False),
        ("3", 3, False),
        (3.0, 3, False),
        (3.5, None, False),
        (True, None, True),
        ("true", None, True),
        (1, 1, True),
        ("0", 0, False),
        (None, None, False),
        ([1], None, False),
        ("many", None, False),
    ],
)
def test_values_are_read_as_vllm_would(
    value: Any,
    integer: int | None,
    boolean: bool,  # noqa: FBT001
) -> None:
    """Its models are lax: numbers may be strings, and booleans numbers."""
    assert as_integer(value) == integer
    assert as_boolean(value) is boolean


def test_json_that_is_none_is_an_error() -> None:
    assert read_json(b'{"a": [1, "b"]}') == {"a": [1, "b"]}
    with pytest.raises(ValueError, match="EOF"):
        read_json(b'{"a"')


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        ('{"n":1.0 , "model" :\t"a"}\n', '{"n":1.0,"model":"b"}'),
        ('{"n": {"model": "x"}}', '{"n":{"model": "x"},"model":"b"}'),
        (
            r'{"n": {"model": "x"}, "mod\u0065l": "a"}',
            '{"n":{"model": "x"},"model":"b"}',
        ),
        (
            r'{"n": "a \"model\" b", "model": null}',
            r'{"n":"a \"model\" b","model":"b"}',
        ),
        (
            r'{"n": "\ud800", "\ud800": 1.00}',
            r'{"n":"\ud800","\ud800":1.0,"model":"b"}',
        ),
        ("{}", '{"model":"b"}'),
    ],
)
def test_the_member_that_is_meant_is_replaced(text: str, edited: str) -> None:
    found = JsonObject.parse(text.encode()).edited({"model": "b", "gone": None})
    assert found.decode() == edited
    assert json.loads(found) == {**json.loads(text), "model": "b"}
