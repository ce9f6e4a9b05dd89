"""The OpenAPI document of everything that is served, made from the models of requests and responses."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema

from router.api.admin import OPERATIONS, REPLICAS
from router.api.bodies import GenerateBody, allowed_values
from router.api.generate import STREAM_ID
from router.api.openai import HEADERS, OpenAIFields
from router.api.paths import CHAT, COMPLETIONS, EMBEDDINGS, MOST_LISTED
from router.api.problems import MEDIA_TYPE

if TYPE_CHECKING:
    from router.settings import LimitSettings
    from tiers.lifecycle.operations import Kind

Schema = dict[str, Any]
RESUMABLE = "Only where the stream can be resumed; with .0 behind it, the Last-Event-ID from before the first event"
JSON, EVENTS = "application/json", "text/event-stream"
_TEXT: Schema = {"type": "string"}
_EVENT: Schema = {
    "type": "object",
    "description": "One server-sent event",
    "required": ["data"],
    "properties": {"id": _TEXT, "event": _TEXT, "data": _TEXT},
}
# What each kind of endpoint may answer besides 200.
_ALWAYS = (400, 401, 408, 413, 421, 431, 500)
_GENERATING = (*_ALWAYS, 403, 422, 429, 502, 503, 504)
_PASSED = (*_GENERATING, 404, 501)
_MEANINGS = {
    400: "The request is not valid",
    401: "No key, or not one in force",
    403: "The key does not allow it, or a web page of another origin sent it",
    404: "There is no such model or stream, or nothing that serves this",
    408: "The request did not come in time",
    409: "It cannot be done to this replica, or not now",
    410: "What is left of the stream is no longer kept",
    413: "The body is too large",
    421: "The Host is a name that is not known to be this router's",
    422: "The request fits no tier, or the engine refuses it",
    429: "The key's quota is used up; see Retry-After",
    431: "Path and headers are too large",
    500: "A fault of the router",
    501: "The engine does not have an option that was asked for",
    502: "The engine failed after its first token",
    503: "No tier that could serve this is ready or has room; see Retry-After",
    504: "The engine did not finish in time",
}


def document(version: str, limits: LimitSettings) -> Schema:
    """Return the document.

    Args:
        version: Of the router.
        limits: What one request may ask.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "QARR",
            "version": version,
            "description": "One language model at three precisions; each prompt goes to the lowest that is good enough.",
        },
        "paths": {
            "/generate": {"post": _generate()},
            "/route": {"post": _route()},
            CHAT: {"post": _completion("Chat completion, routed", ["messages"])},
            COMPLETIONS: {"post": _completion("Completion, routed", ["prompt"])},
            EMBEDDINGS: {"post": _passed("Embeddings, from the engines named for them", {"model": _TEXT, "input": {}})},
            "/v1/models": {"get": _get("Every model name that is answered to", _ref("ModelList"), openai=True)},
            "/v1/models/{id}": {"get": _one_model()},
            "/tokenize": {
                "post": _passed("Tokens of a text or a chat", {"model": _MODEL, "prompt": {}, "messages": {}})
            },
            "/detokenize": {"post": _passed("Text of tokens", {"model": _MODEL, "tokens": {}})},
            **_admin(),
            "/tiers": {"get": _get("The fleet as it is now", _ref("Fleet"))},
            "/readyz": {"get": _ready()},
            "/healthz": {"get": _open("The router is alive", {"type": "object"})},
            **_seen(),
            "/openapi.json": {"get": _get("This document", {"type": "object"})},
            "/metrics": {
                "get": {
                    "summary": "Metrics for Prometheus",
                    "responses": {
                        "200": {"description": "Prometheus' text format", "content": _content(_TEXT, "text/plain")}
                    },
                }
            },
        },
        "components": {
            "schemas": _schemas(limits),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "'qarr keys add' makes one"}
            },
        },
        "security": [{"key": []}, {}],
    }


_MODEL: Schema = {"type": ["string", "null"], "description": "auto, qarr, fast, balanced, precise, or an alias"}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(schema: Schema, media_type: str = JSON) -> Schema:
    return {media_type: {"schema": schema}}


def _errors(statuses: tuple[int, ...], *, openai: bool) -> Schema:
    content = _content(_ref("OpenAIError")) if openai else _content(_ref("Problem"), MEDIA_TYPE)
    if openai:
        # vLLM's own refusals are passed on as they are.
        content = _content({"anyOf": [_ref("OpenAIError"), {"type": "object"}]})
    return {str(status): {"description": _MEANINGS[status], "content": content} for status in sorted(statuses)}


def _generate() -> Schema:
    resume: Schema = {
        "name": "Last-Event-ID",
        "in": "header",
        "schema": _TEXT,
        "description": "Id of the last event of a resumable stream that the caller has: the answer is what came after it, "
        "and the body is not looked at",
    }
    return {
        "summary": "Generate, streamed or as one object; or go on with a stream",
        "parameters": [resume],
        "requestBody": {"required": True, "content": _content(_ref("GenerateBody"))},
        "responses": {
            "200": {
                "description": "Text events and one done or error event; with stream false, one object",
                "headers": {**_answer_headers(), STREAM_ID: {"description": RESUMABLE, "schema": _TEXT}},
                "content": {**_content(_EVENT, EVENTS), **_content(_ref("Answer"))},
            },
            "204": {"description": "The caller has every event of the stream already"},
            **_errors((*_GENERATING, 404, 410), openai=False),
        },
    }


def _route() -> Schema:
    return {
        "summary": "The decision, without generating",
        "requestBody": {"required": True, "content": _content(_ref("GenerateBody"))},
        "responses": {
            "200": {
                "description": "The decision; tier is null where it is a refusal",
                "content": _content(_ref("Decision")),
            },
            **_errors((*_ALWAYS, 403, 429), openai=False),
        },
    }


def _completion(summary: str, fields: list[str]) -> Schema:
    body = {
        "type": "object",
        "description": "Whatever vLLM takes; besides model and qarr it is passed on as it is",
        "properties": {
            "model": _MODEL,
            "stream": {"type": ["boolean", "null"]},
            "qarr": _ref("RoutingFields"),
            **{field: {"description": "As vLLM has it"} for field in fields},
        },
    }
    return {
        "summary": summary,
        "parameters": [
            {
                "name": name,
                "in": "header",
                "schema": _header_schema(path),
                "description": f"As qarr.{'.'.join(path)}",
            }
            for name, path in HEADERS.items()
        ],
        "requestBody": {"required": True, "content": _content(body)},
        "responses": {
            "200": {
                "description": "The engine's own answer",
                "headers": _answer_headers(),
                "content": {**_content({"type": "object"}), **_content(_EVENT, EVENTS)},
            },
            **_errors(_PASSED, openai=True),
        },
    }


def _passed(summary: str, properties: Schema) -> Schema:
    body = {"type": "object", "properties": properties}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _content(body)},
        "responses": {
            "200": {"description": "The engine's own answer", "content": _content({"type": "object"})},
            **_errors(_PASSED, openai=True),
        },
    }


def _get(summary: str, schema: Schema, *, openai: bool = False) -> Schema:
    return {
        "summary": summary,
        "responses": {
            "200": {"description": summary, "content": _content(schema)},
            **_errors((401, 421, 500), openai=openai),
        },
    }


def _open(summary: str, schema: Schema) -> Schema:
    return {
        "summary": summary,
        "security": [],
        "responses": {"200": {"description": summary, "content": _content(schema)}},
    }


def _ready() -> Schema:
    answered = _open("At least one tier serves", _ref("Readiness"))
    answered["responses"]["503"] = {"description": "No tier serves yet", "content": _content(_ref("Readiness"))}
    return answered


def _one_model() -> Schema:
    found = _get("One model name", _ref("Model"), openai=True)
    found["parameters"] = [_parameter("id")]
    found["responses"] |= _errors((404,), openai=True)
    return found


def _seen() -> dict[str, Schema]:
    """Return what tells how requests go; each router tells of its own."""
    limit: Schema = {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": MOST_LISTED, "default": 100},
    }
    records = _get("The last requests that have ended, newest first", _ref("RequestList"))
    traces = _get("The traces that are kept, newest first", _ref("TraceList"))
    for listed in (records, traces):
        listed["parameters"] = [limit]
        listed["responses"] |= _errors((400,), openai=False)
    one = _get("One trace, with its spans", _ref("Trace"))
    one["parameters"] = [_parameter("trace_id")]
    one["responses"] |= _errors((404,), openai=False)
    live = _get("Records of requests and the fleet as it is, again and again", _EVENT)
    live["responses"]["200"]["content"] = _content(_EVENT, EVENTS)
    page = _open("The page to watch this router and to try it", _TEXT)
    page["responses"]["200"]["content"] = _content(_TEXT, "text/html")
    page["responses"] |= {"304": {"description": "The browser has it already"}, **_errors((404,), openai=False)}
    return {
        "/": {"get": page},
        "/live": {"get": live},
        "/requests": {"get": records},
        "/traces": {"get": traces},
        "/traces/{trace_id}": {"get": one},
        "/policy": {"get": _get("The table that decisions are made by", _ref("Policy"))},
    }


def _admin() -> dict[str, Schema]:
    """Return what operators may do; without keys it is answered on loopback only."""
    meanings: dict[Kind, str] = {
        "drain": "Give a replica no new requests",
        "resume": "Give a drained replica requests again",
        "restart": "Drain an engine that was started here, stop it and start it again",
        "recycle": "Replace an engine that was started here by a new one",
    }
    statuses, named = (401, 403, 404, 409, 413, 500, 503), _parameter("id")
    paths: dict[str, Schema] = {}
    for kind, meaning in meanings.items():
        begun = {
            "description": "It has begun; the operation tells how far it is",
            "content": _content(_ref("Operation")),
        }
        responses = {"202": begun, **_errors(statuses, openai=False)}
        paths[f"{REPLICAS}/{kind}"] = {"post": {"summary": meaning, "parameters": [named], "responses": responses}}
    all_of_them = _get("Operations, the latest last", _ref("OperationList"))
    one = _get("One operation", _ref("Operation"))
    one["parameters"] = [named]
    for asked in (all_of_them, one):
        asked["responses"] |= _errors((403, 404), openai=False)
    return {**paths, OPERATIONS: {"get": all_of_them}, OPERATIONS + "/{id}": {"get": one}}


def _parameter(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


def _answer_headers() -> Schema:
    meanings = {
        "x-qarr-tier": "Who served it",
        "x-qarr-precision": "At which precision",
        "x-qarr-reason": "Why",
        "x-qarr-degraded": "What it is not expected to keep: quality, latency; absent otherwise",
        "x-qarr-checkpoint": "Digest of the weights, where known",
        "x-qarr-trace-id": "The request's trace",
        "x-request-id": "The caller's, or a new one",
    }
    return {name: {"description": text, "schema": _TEXT} for name, text in meanings.items()}


def _schemas(limits: LimitSettings) -> Schema:
    """Return the schemas of all bodies, with what one request may ask."""
    body = deepcopy(_models()["GenerateBody"])
    for field, allowed in allowed_values(limits).items():
        if field in body["properties"]:
            body["properties"][field]["description"] = allowed
    for field in ("prompt", "system_prompt"):
        _unless_null(body["properties"][field])["maxLength"] = limits.max_prompt_chars
    _unless_null(body["properties"]["max_tokens"])["maximum"] = limits.max_tokens
    return {**_models(), "GenerateBody": body}


@cache
def _models() -> Schema:
    """Return the schemas of all models by their names. They are made when the document is asked for, once."""
    from router.api.responses import MODELS  # noqa: PLC0415  50 ms of start-up, and few ask

    checked = [(GenerateBody, "validation"), (OpenAIFields, "validation")]
    models: Any = [*checked, *((model, "serialization") for model in MODELS)]
    _, made = models_json_schema(models, ref_template="#/components/schemas/{model}")
    found: Schema = made["$defs"]
    return {"RoutingFields" if name == OpenAIFields.__name__ else name: schema for name, schema in found.items()}


def _header_schema(path: tuple[str, ...]) -> Schema:
    """Return what a header may hold: the same as the field of the body that it stands for."""
    field = _models()["SlaBody" if path[0] == "sla" else "RoutingFields"]["properties"][path[-1]]
    return {name: value for name, value in _unless_null(field).items() if name not in {"default", "title"}}


def _unless_null(schema: Schema) -> Schema:
    """Return the part of a schema that is not for null."""
    found: Schema = next((part for part in schema.get("anyOf", ()) if part["type"] != "null"), schema)
    return found
