"""The examples in the documents: their questions, and the tiers that answered.

A small model's answer depends on the processor. So an example's output is not compared with words: the engine that served it
must find it a likely answer to the example's question.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx

from router.section import PROJECT

if TYPE_CHECKING:
    from tests.engine.conftest import Up

QUESTION = re.compile(r"""(?:content|input)"?: "([^"]+)"|stream\("([^"]+)"\)""")
BODY = re.compile(r"-d '(\{.*?\})'", re.DOTALL)
REPORT = "\n{'"  # With this the report begins that an example prints after its answer.


def blocks(language: str, document: str) -> list[str]:
    """Return the code blocks of a document in one language."""
    text = (PROJECT / document).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def question_in(code: str) -> str:
    """Return the one question that a program asks."""
    (question,) = {"".join(groups) for groups in QUESTION.findall(code)}
    return question


def messages_in(curl: str) -> list[Any]:
    """Return the chat that a curl command sends, in any of the APIs."""
    (sent,) = BODY.findall(curl)
    body = json.loads(sent)
    messages: list[Any] = body.get("messages") or [
        {"role": "user", "content": body["prompt"]}
    ]
    return messages


def text_in(answer: dict[str, Any]) -> str:
    """Return the text of a whole answer of any API."""
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    if "content" in answer:
        return str(answer["content"][0]["text"])
    return str(answer["text"])


def served_by(up: Up, number: int = 0) -> str:
    """Return which tier served the last request; ``number`` more have come since then."""
    records = httpx.get(f"{up.url}/requests", trust_env=False).json()["requests"]
    tier: str = records[number]["served_by"]
    return tier


def check_output(up: Up, code: str, output: str, number: int = 0) -> None:
    """Check that a program printed a likely answer to its question: that of the tier that served it."""
    answer = output.partition(REPORT)[0].strip("\n")
    up.scorer(served_by(up, number)).check_answer(question_in(code), answer)
