"""Long data in a body: it is cut out for an edit and put back, and nothing else is taken for data."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.upstream import long_data
from router.upstream.json_object import JsonObject
from router.upstream.long_data import MIN_TEXT_BYTES, STEP_BYTES, cut

# Members around data that look like data, or like the end of a string.
TRAPS: st.SearchStrategy[Any] = st.sampled_from(
    [
        "x",
        "",
        ";base64,",
        '";base64,',
        '"data":"',
        'a\\"data":"b\\',
        ":",
        list(range(30_000)),  # long, without quotes, and outside of any string
        ["data", ":"],
        {"data": list(range(20_000))},
        {'x"data': "y"},
        "text without quotes, with; semicolons, " * 2000,
        "\\" * 40_000,
        "é" * 40_000,
    ]
)
LENGTHS = st.integers(STEP_BYTES // 2, 5 * STEP_BYTES)


@st.composite
def data(draw: st.DrawFn) -> Any:
    """Return a value with long data as clients send it, or something like it."""
    letters = draw(st.sampled_from(["A", "Ab+/", "é", "a/b", 'q"', "\\"]))
    chars = draw(LENGTHS)
    long_text = (letters * chars)[:chars]
    form = draw(st.sampled_from(["url", "anthropic", "audio", "plain", "member"]))
    if form == "url":
        return {"image_url": {"url": f"data:image/png;base64,{long_text}"}}
    if form == "anthropic":
        return {"source": {"type": "base64", "data": long_text}}
    if form == "audio":
        return {"input_audio": {"format": "wav", "data": long_text}}
    if form == "member":
        return {f"x;base64,{long_text}": 1}
    return long_text


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """Return a body; slashes may be escaped, as PHP writes them, and members be set apart by spaces or not."""
    parts = draw(st.lists(st.one_of(TRAPS, data()), min_size=1, max_size=6))
    members = {"model": "m", "messages": [{"content": parts}]}
    if draw(st.booleans()):
        members["extra"] = draw(st.one_of(TRAPS, data()))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]))
    text = json.dumps(
        members, ensure_ascii=draw(st.booleans()), separators=separators
    ).encode()
    if draw(st.booleans()):
        text = text.replace(b"/", b"\\/")
    return text


@settings(deadline=None, max_examples=60)
@given(texts())
def test_what_is_cut_out_is_put_back(text: bytes) -> None:
    shorter = cut(text)
    assert shorter.put_back(shorter.text) == text
    # The rest is JSON of the same form: only in strings is something else.
    assert shape(json.loads(shorter.text)) == shape(json.loads(text))


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return [shape(item) for item in value.values()]
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value) if isinstance(value, str) else value


@settings(deadline=None, max_examples=60)
@given(texts(), st.sampled_from(["model", "extra", "messages"]))
def test_an_edit_is_what_it_is_without_cutting(text: bytes, changed: str) -> None:
    changes = {changed: None, "new": b'{"raw": 1.0}'}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_data, "MIN_TEXT_BYTES", len(text) + 1)
        plain = JsonObject.parse(text)
        expected = plain.edited(changes)
        members = {name: plain.text_of(name) for name in plain.values}
    document = JsonObject.parse(text)
    assert document.edited(changes) == expected
    assert {name: document.text_of(name) for name in document.values} == members


@pytest.mark.parametrize(
    "part",
    [
        {"image_url": {"url": "data:image/png;base64," + "QUJD" * STEP_BYTES}},
        {"source": {"data": "QUJD" * STEP_BYTES, "media_type": "image/png"}},
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_images_are_cut_out(part: dict[str, Any], separators: tuple[str, str]) -> None:
    """Of several images nothing is left in the text."""
    text = json.dumps({"messages": [part] * 3}, separators=separators).encode()
    shorter = cut(text)
    assert len(shorter.data) == 3
    assert len(shorter.text) < 1000
    assert cut(b'{"a":"' + b"x" * (MIN_TEXT_BYTES - 10) + b'"}').data == ()
