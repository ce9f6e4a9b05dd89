"""A small errand for agents: a repository whose test fails, and a model that repairs it by script.

The model reads a file, edits it, runs the test and says that it is done, with the tools that the agent offers, under the
names and with the arguments that this agent's tools have. What it does next depends on the conversation alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

TASK = "The test in test_calc.py fails. Read calc.py, repair it, run `python3 test_calc.py`, and say when it passes."
WRONG = "    return a - b\n"
RIGHT = "    return a + b\n"
MODULE = f'"""Sums."""\n\n\ndef add(a: int, b: int) -> int:\n{WRONG}'
# Without bytecode: that of a file changed within the same second, and of the same size, would be taken for current.
TEST = """import sys

sys.dont_write_bytecode = True
from calc import add

assert add(2, 3) == 5, f"2 + 3 is {add(2, 3)}"
print("passed")
"""
RUN_TEST = "python3 test_calc.py"
DONE = "I repaired add() in calc.py; the test passes."
CALL_PREFIX = "call_errand_"
# What it answers an agent that wants a title for the conversation, or a message for a commit.
TITLE = "Repair of add()"
THOUGHTS = (
    "I should look at the file before I change anything.",
    "The function subtracts, but its name says that it adds.",
    "Now I run the test to see whether that was all.",
    "The test passes, so I can say so.",
)


class Call(NamedTuple):
    """A call of a tool; a tool without a schema takes a text instead of JSON."""

    name: str
    arguments: str
    is_custom: bool = False


class Turn(NamedTuple):
    """What the model writes at once: its thought, its text and its call."""

    thought: str
    text: str
    call: Call | None = None


class Tool(NamedTuple):
    """A tool on offer; one that takes a text instead of JSON has no parameters."""

    parameters: frozenset[str]
    is_custom: bool

    def takes(self, call: Call) -> bool:
        """Tell whether a call's arguments are the tool's."""
        if self.is_custom or not call.arguments.startswith("{"):
            return self.is_custom
        return set(json.loads(call.arguments)) <= self.parameters


@dataclass(slots=True)
class Conversation:
    """What a script needs of a request, whichever API it came by.

    Attributes:
        tools: The tools on offer by name.
        results: How many of the script's calls have a result.
        texts: The texts of all messages.
    """

    tools: dict[str, Tool] = field(default_factory=dict)
    results: int = 0
    texts: list[str] = field(default_factory=list)


def make_repository(folder: Path) -> None:
    """Write the errand's repository, in which the test fails."""
    (folder / "calc.py").write_text(MODULE)
    (folder / "test_calc.py").write_text(TEST)
    for command in (
        ["init", "-q", "-b", "main"],
        ["add", "."],
        [
            "-c",
            "user.name=Errand",
            "-c",
            "user.email=errand@example.com",
            "commit",
            "-qm",
            "Sums",
        ],
    ):
        subprocess.run(
            ["git", *command], cwd=folder, check=True, capture_output=True, timeout=60
        )


def is_repaired(folder: Path) -> bool:
    """Tell whether the repository's test passes."""
    test = subprocess.run(
        [sys.executable, "test_calc.py"],
        cwd=folder,
        capture_output=True,
        check=False,
        timeout=60,
    )
    return test.returncode == 0


# What follows reads requests.


def conversation_of(path: str, body: Mapping[str, Any]) -> Conversation:
    """Read a request to one of the three APIs."""
    conversation = Conversation()
    for tool in body.get("tools") or ():
        named = tool.get("function", tool)
        if "name" in named:
            schema = named.get("parameters") or named.get("input_schema") or {}
            parameters = frozenset(schema.get("properties", ()))
            is_custom = tool.get("type") == "custom"
            conversation.tools[named["name"]] = Tool(parameters, is_custom)
    if path.endswith("/responses"):
        _read_items(body.get("input"), conversation)
        conversation.texts.append(_text_of(body.get("instructions")))
    else:
        conversation.texts.append(_text_of(body.get("system")))
        _read_messages(body.get("messages") or (), conversation)
    return conversation


def _read_items(items: Any, conversation: Conversation) -> None:
    if isinstance(items, str):
        conversation.texts.append(items)
        return
    for item in items or ():
        if str(item.get("call_id")).startswith(CALL_PREFIX) and "output" in item:
            conversation.results += 1
        conversation.texts.append(_text_of(item.get("content")))


def _read_messages(messages: Sequence[Any], conversation: Conversation) -> None:
    for message in messages:
        if str(message.get("tool_call_id")).startswith(CALL_PREFIX):
            conversation.results += 1
        content = message.get("content")
        conversation.texts.append(_text_of(content))
        if message.get("role") == "assistant":
            # An agent may write its calls into the text, rather than beside it.
            conversation.results += conversation.texts[-1].count(f"'{CALL_PREFIX}")
        if isinstance(content, list):
            conversation.results += sum(
                str(block.get("tool_use_id")).startswith(CALL_PREFIX)
                for block in content
            )


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(
        block["text"] for block in content if isinstance(block.get("text"), str)
    )


# What follows is the script.


class Script(NamedTuple):
    """A model for one repository."""

    folder: Path

    def answer(self, path: str, body: Mapping[str, Any]) -> Turn:
        """Return what the model writes next."""
        conversation = conversation_of(path, body)
        if not conversation.tools:
            return self._answer_in_text(conversation)
        step = conversation.results
        calls = self._calls()
        if step >= len(calls):
            return self._finish(conversation)
        for call in calls[step]:
            tool = conversation.tools.get(call.name)
            if tool is not None and tool.takes(call):
                made = call._replace(is_custom=tool.is_custom)
                return Turn(THOUGHTS[step], "", made)
        # An agent may ask with other tools than its own for a title, say.
        return Turn(THOUGHTS[-1], TITLE)

    def _finish(self, conversation: Conversation) -> Turn:
        if "final_answer" in conversation.tools:
            answer = json.dumps({"answer": DONE})
            return Turn(THOUGHTS[-1], "", Call("final_answer", answer))
        return Turn(THOUGHTS[-1], DONE)

    def _answer_in_text(self, conversation: Conversation) -> Turn:
        """Answer an agent that has no tools: its first edit is wrong, and the failed test is the next question."""
        system = conversation.texts[0] + conversation.texts[1]
        if "SEARCH/REPLACE" not in system:
            return Turn(THOUGHTS[-1], TITLE)
        has_failed = any("AssertionError" in text for text in conversation.texts)
        old, new = WRONG, "    return b - a\n"
        if has_failed:
            old, new = new, RIGHT
        block = f"calc.py\n```python\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```\n"
        return Turn(THOUGHTS[1], f"The sign is wrong.\n\n{block}")

    def _calls(self) -> tuple[tuple[Call, ...], ...]:
        """Return for each step the calls that do it, one for each agent's tools."""
        file = str(self.folder / "calc.py")
        sed = "sed -i 's/a - b/a + b/' calc.py"
        patch = f"*** Begin Patch\n*** Update File: calc.py\n@@\n-{WRONG}+{RIGHT}*** End Patch\n"
        return (
            (
                _call("read_file", file_path=file),
                _call("read", filePath=file),
                _call("shell_command", command="cat calc.py"),
                _call("exec_command", cmd="cat calc.py"),
            ),
            (
                _call("edit", filePath=file, oldString=WRONG, newString=RIGHT),
                _call("edit", file_path=file, old_string=WRONG, new_string=RIGHT),
                Call("apply_patch", patch),
                _call("shell_command", command=sed),
                _call("exec_command", cmd=sed),
            ),
            (
                _call("run_shell_command", command=RUN_TEST, is_background=False),
                _call("bash", command=RUN_TEST, description="Runs the test"),
                _call("shell_command", command=RUN_TEST),
                _call("exec_command", cmd=RUN_TEST),
            ),
        )


def _call(name: str, **arguments: Any) -> Call:
    return Call(name, json.dumps(arguments))
