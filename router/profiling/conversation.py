"""Tools that a task offers and messages after its prompt, in OpenAI's form: what they must look like."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import jsonschema_rs
from pydantic import Field, TypeAdapter, ValidationError, field_validator

from router.policy.profiles import Frozen
from router.profiling.calls import ExpectedArgument, ExpectedCall

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


def check_expected_calls(
    expected_calls: Sequence[ExpectedCall], tools: Sequence[Any]
) -> None:
    """Check the calls that a task expects against the tools that it offers.

    Raises:
        ValueError: A function is not offered, or arguments are missing, unknown or not valid by the function's schema.
    """
    schemas: dict[str, dict[str, Any]] = {}
    for tool in _validate(TOOLS, tools):
        schemas[tool.function.name] = tool.function.parameters
    for expected_call in expected_calls:
        if expected_call.name not in schemas:
            offered = ", ".join(schemas) or "none"
            raise ValueError(
                f"the function {expected_call.name} is not offered; tools has {offered}"
            )
        _check_arguments(expected_call, schemas[expected_call.name])


def _check_arguments(expected_call: ExpectedCall, schema: Mapping[str, Any]) -> None:
    required = set(schema.get("required", ()))
    certain = {
        name
        for name, argument in expected_call.arguments.items()
        if not argument.is_optional
    }
    if required - certain:
        names = ", ".join(sorted(required - certain))
        raise ValueError(f"{expected_call.name} requires {names}")
    properties = schema.get("properties", {})
    for name, argument in expected_call.arguments.items():
        if name not in properties:
            known = ", ".join(properties) or "no arguments"
            raise ValueError(
                f"{expected_call.name} has no argument {name}; it has {known}"
            )
        location = f"{expected_call.name}.{name}"
        _check_values(location, name, argument=argument, schema=schema)
        if _has_enum(properties[name]) and not argument.is_exact:
            raise ValueError(
                f'{location} has an enum, so its values count only as written: set "exact": true'
            )


def _check_values(
    location: str, name: str, *, argument: ExpectedArgument, schema: Mapping[str, Any]
) -> None:
    """Check an argument's right values by its function's schema, each as if it were the only argument."""
    schema_of_one = {**schema, "required": []}
    validator = jsonschema_rs.validator_for(schema_of_one, offline=True)
    for value in argument.values:
        error = next(validator.iter_errors({name: value}), None)
        if error is not None:
            raise ValueError(f"{location}: {error.message}")


def _has_enum(schema: Any) -> bool:
    """Tell whether a schema, or one within it, lists values."""
    if isinstance(schema, Mapping):
        return "enum" in schema or any(map(_has_enum, schema.values()))
    return isinstance(schema, list) and any(map(_has_enum, schema))


def _validate(adapter: TypeAdapter[Validated], values: Sequence[Any]) -> Validated:
    """Return values as their type; ``ValueError``: the first fault, in one line."""
    try:
        return adapter.validate_python(tuple(values))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        location = ".".join(map(str, fault["loc"]))
        message = fault["msg"].removeprefix("Value error, ")
        raise ValueError(f"{location}: {message}") from None
