"""Texts of tasks and answers as a person reads them beside one another, of bounded length."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.profiling.model_answer import ModelAnswer
    from router.profiling.tasks import Task

PROMPT_CHARS = 4000
ANSWER_CHARS = 4000
WANTED_CHARS = 1500
# Of a text that is too long, this share is kept from its start; the rest of the room is for its end.
START_SHARE = 0.6


def shortened(text: str, limit: int) -> str:
    """Return a text without its middle where it has more than ``limit`` characters, and say how many are left out."""
    if len(text) <= limit:
        return text
    start_chars = int(limit * START_SHARE)
    end_chars = limit - start_chars
    left_out = len(text) - limit
    start = text[:start_chars]
    end = text[-end_chars:]
    return f"{start}\n… ({left_out:,} characters left out) …\n{end}"


def prompt_text(task: Task) -> str:
    """Return a task's chat; a single message stands alone, others have their role before them."""
    tools = [_tool_text(tool) for tool in task.tools]
    messages = task.messages
    if len(messages) == 1 and not tools:
        return shortened(task.prompt, PROMPT_CHARS)
    parts = [f"{message['role']}: {_message_text(message)}" for message in messages]
    if tools:
        parts.insert(0, f"functions: {', '.join(tools)}")
    return shortened("\n\n".join(parts), PROMPT_CHARS)


def answer_text(answer: ModelAnswer) -> str:
    """Return an answer without its thoughts: its text, then its calls; say where it has neither, or was cut."""
    parts = [f"{call.name}({call.arguments})" for call in answer.tool_calls]
    if answer.text.strip():
        parts.insert(0, answer.text.strip())
    text = shortened("\n".join(parts) or "(no text)", ANSWER_CHARS)
    if answer.finish_reason == "length":
        text += "\n(cut at the limit of tokens)"
    return text


def wanted_text(task: Task) -> str:
    """Return in words what a right answer to a task is."""
    fields = task.check.model_dump(by_alias=True, exclude_defaults=True)
    return shortened(_wanted(fields), WANTED_CHARS)


def _wanted(fields: Mapping[str, Any]) -> str:
    """Return in words what a check with these fields wants; one without words of its own shows the fields."""
    describe = _WORDS.get(str(fields["type"]), _fields_in_words)
    return describe(fields)


def _message_text(message: Mapping[str, Any]) -> str:
    parts = []
    if message.get("content"):
        parts.append(str(message["content"]))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(f"{function['name']}({function['arguments']})")
    return "\n".join(parts)


def _tool_text(tool: Mapping[str, Any]) -> str:
    """Return a function's name, and the names of its parameters."""
    function = tool["function"]
    parameters = function.get("parameters") or {}
    names = ", ".join(parameters.get("properties") or ())
    return f"{function['name']}({names})"


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _quoted(texts: Sequence[str]) -> str:
    return ", ".join(_as_json(text) for text in texts)


def _number_in_words(fields: Mapping[str, Any]) -> str:
    text = f"the number {fields['value']:.15g}"
    if fields.get("tolerance"):
        text += f", or at most {fields['tolerance']:g} away from it"
    return text


def _choice_in_words(fields: Mapping[str, Any]) -> str:
    return f"the option {fields['value']} of {', '.join(fields['options'])}"


def _exact_in_words(fields: Mapping[str, Any]) -> str:
    values = fields["values"]
    if len(values) == 1:
        return f"{_as_json(values[0])} and nothing else"
    return f"one of {_quoted(values)} and nothing else"


def _contains_in_words(fields: Mapping[str, Any]) -> str:
    parts = []
    if fields.get("all"):
        parts.append(f"a text with {_quoted(fields['all'])}")
    if fields.get("any"):
        parts.append(f"a text with one of {_quoted(fields['any'])}")
    if fields.get("none"):
        parts.append(f"a text without {_quoted(fields['none'])}")
    return "; ".join(parts)


def _regex_in_words(fields: Mapping[str, Any]) -> str:
    return f"a text in which the pattern {fields['pattern']} is found"


def _json_in_words(fields: Mapping[str, Any]) -> str:
    parts = ["JSON"]
    values = fields.get("values") or {}
    if values:
        pairs = [f"{pointer or '/'} = {_as_json(v)}" for pointer, v in values.items()]
        parts.append(f"with {', '.join(pairs)}")
    if fields.get("schema"):
        parts.append(f"of the schema {_as_json(fields['schema'])}")
    return " ".join(parts)


def _code_in_words(fields: Mapping[str, Any]) -> str:
    name = fields.get("function") or "its result"
    cases = [
        f"{name}({', '.join(map(_as_json, case[0]))}) = {_as_json(case[1])}"
        for case in fields["cases"]
    ]
    return f"Python with {', '.join(cases)}"


def _runs_in_words(fields: Mapping[str, Any]) -> str:
    return f"Python that passes this test:\n{fields['test']}"


def _calls_in_words(fields: Mapping[str, Any]) -> str:
    calls = fields["calls"]
    if calls:
        return f"these calls in any order: {_as_json(calls)}"
    if fields.get("text"):
        return f"no call, but {_wanted(fields['text'])}"
    return "no call, but a text"


def _fields_in_words(fields: Mapping[str, Any]) -> str:
    """Return the fields of a check, as in "constraints: sentences 3, lowercase true"."""
    parts = [
        f"{name.replace('_', ' ')} {_as_json(value)}"
        for name, value in fields.items()
        if name != "type"
    ]
    return f"{fields['type']}: {', '.join(parts)}"


_WORDS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "number": _number_in_words,
    "choice": _choice_in_words,
    "exact": _exact_in_words,
    "contains": _contains_in_words,
    "regex": _regex_in_words,
    "json": _json_in_words,
    "code": _code_in_words,
    "runs": _runs_in_words,
    "calls": _calls_in_words,
}
