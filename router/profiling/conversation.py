"""Tools that a task offers and messages after its prompt, in OpenAI's form: what they must look like."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import jsonschema_rs
from pydantic import Field, TypeAdapter, ValidationError, field_validator

from router.policy.profiles import Frozen

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Text = Annotated[str, Field(min_length=1)]


class ToolFunction(Frozen):
    """A function that a model may ask for."""

    name: Name
    description: str = ""
    parameters: dict[str, Any] = Field(default={})
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _is_schema_of_object(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if schema and schema.get("type") != "object":
            raise ValueError('a JSON schema with "type": "object" is needed')
        # A schema that is none raises a ValueError that says what is wrong.
        jsonschema_rs.validator_for(schema, offline=True)
        return schema


class FunctionTool(Frozen):
    """A tool as requests offer it."""

    type: Literal["function"]
    function: ToolFunction


class CalledFunction(Frozen):
    """The function that an earlier answer asked for; its arguments are JSON text."""

    name: Name
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_json(cls, arguments: str) -> str:
        json.loads(arguments)
        return arguments


class EarlierCall(Frozen):
    """A call in an earlier answer."""

    id: Text
    type: Literal["function"]
    function: CalledFunction


class UserTurn(Frozen):
    role: Literal["user"]
    content: Text


class AssistantTurn(Frozen):
    """An earlier answer: text, calls or both."""

    role: Literal["assistant"]
    content: str | None = None
    tool_calls: tuple[EarlierCall, ...] = ()


class ToolTurn(Frozen):
    """The result of an earlier call."""

    role: Literal["tool"]
    tool_call_id: Text
    content: str


Turn = Annotated[UserTurn | AssistantTurn | ToolTurn, Field(discriminator="role")]
TURNS = TypeAdapter[tuple[Turn, ...]](tuple[Turn, ...])
TOOLS = TypeAdapter[tuple[FunctionTool, ...]](tuple[FunctionTool, ...])
Validated = TypeVar("Validated")


def check_turns(turns: Sequence[Any]) -> None:
    """Check the messages after a prompt.

    Raises:
        ValueError: One is no message, a result answers no earlier call, or the last leaves the model nothing to answer.
    """
    messages = _validate(TURNS, turns)
    call_ids: set[str] = set()
    for message in messages:
        if isinstance(message, AssistantTurn):
            call_ids |= {call.id for call in message.tool_calls}
        elif isinstance(message, ToolTurn) and message.tool_call_id not in call_ids:
            raise ValueError(
                f"tool_call_id {message.tool_call_id!r} is the id of no earlier call"
            )
    if messages and isinstance(messages[-1], AssistantTurn):
        raise ValueError("the last message must be the user's or a tool's result")


def check_tools(tools: Sequence[Any]) -> None:
    """Check the tools of a request; ``ValueError``: one is no function, or two have the same name."""
    names: set[str] = set()
    for tool in _validate(TOOLS, tools):
        name = tool.function.name
        if name in names:
            raise ValueError(f"two functions are named {name}")
        names.add(name)


def _validate(adapter: TypeAdapter[Validated], values: Sequence[Any]) -> Validated:
    """Return values as their type; ``ValueError``: the first fault, in one line."""
    try:
        return adapter.validate_python(tuple(values))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        location = ".".join(map(str, fault["loc"]))
        message = fault["msg"].removeprefix("Value error, ")
        raise ValueError(f"{location}: {message}") from None
