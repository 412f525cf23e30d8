"""Generates the OpenAPI document of the HTTP face from its table of endpoints and the classes of its JSON."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from raymq.gateway.http.shapes import ErrorAnswer, SentMessage

OPENAPI_VERSION: Final = "3.1.0"
API_VERSION: Final = "1"
_REFERENCE: Final = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class QueryParameter:
    """A parameter in a query string. `schema`: its JSON schema."""

    name: str
    description: str
    schema: dict[str, Any] = field(default_factory=lambda: {"type": "string"})
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint as the document describes it. `path`: with its parameters in braces. `request`, `answer`: the types
    of the JSON, None for no JSON. `is_raw`: whether a request may also be any bytes. `events`: the types of the data of
    server-sent events, by event. `statuses`: the HTTP statuses of a success, with their meaning."""

    method: str
    path: str
    summary: str
    request: Any = None
    answer: Any = None
    is_raw: bool = False
    query: Sequence[QueryParameter] = ()
    events: dict[str, Any] = field(default_factory=dict)
    statuses: dict[int, str] = field(default_factory=lambda: {200: "Success."})
    has_user: bool = True


@dataclass(frozen=True, slots=True)
class Webhook:
    """A request that the gateway sends. `body`: the type of its JSON. `headers`: the meaning of each header."""

    summary: str
    body: Any
    headers: Mapping[str, str]


def document(endpoints: Sequence[Endpoint], webhooks: Mapping[str, Webhook] | None = None) -> dict[str, Any]:
    """Return the OpenAPI document of the endpoints, as JSON values. `webhooks`: the requests that the gateway sends, by
    event."""
    webhooks = webhooks or {}
    types = [ErrorAnswer, SentMessage, *(one.body for one in webhooks.values())]
    for one in endpoints:
        types += [kind for kind in (one.request, one.answer, *one.events.values()) if kind is not None]
    found, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schemas = dict(zip(map(str, types), found, strict=True))
    for schema in components.values():
        if "description" in schema:
            schema["description"] = " ".join(inspect.cleandoc(schema["description"]).split())
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, schemas)
    token = {"type": "http", "scheme": "bearer", "description": "USER:SECRET; see `raymq user gateway-secret`."}
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "raymq gateway", "version": API_VERSION},
        "paths": paths,
        "webhooks": {name: {"post": _sent(one, schemas)} for name, one in webhooks.items()},
        "components": {"schemas": components, "securitySchemes": {"token": token}},
    }


def _operation(one: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    names = [part[1:-1] for part in one.path.split("/") if part.startswith("{")]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    parameters += [
        {
            "name": each.name,
            "in": "query",
            "required": each.is_required,
            "description": each.description,
            "schema": each.schema,
        }
        for each in one.query
    ]
    if one.has_user:
        parameters.append(
            {
                "name": "x-mq-namespace",
                "in": "header",
                "description": "The namespace of the names in the request.",
                "schema": {"type": "string"},
            }
        )
    operation: dict[str, Any] = {"summary": one.summary, "parameters": parameters, "responses": {}}
    if one.request is not None:
        content = {"application/json": {"schema": schemas[str(one.request)]}}
        if one.is_raw:
            content["*/*"] = {"schema": {}}
        operation["requestBody"] = {"required": True, "content": content}
    for status, meaning in one.statuses.items():
        operation["responses"][str(status)] = {"description": meaning, **_content(one, schemas)}
    problem = {"application/problem+json": {"schema": schemas[str(ErrorAnswer)]}}
    operation["responses"]["default"] = {"description": "The request failed.", "content": problem}
    if one.has_user:
        operation["security"] = [{}, {"token": []}]
    return operation


def _sent(one: Webhook, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the operation of a request that the gateway sends."""
    headers = [
        {"name": name, "in": "header", "description": meaning, "schema": {"type": "string"}}
        for name, meaning in one.headers.items()
    ]
    return {
        "summary": one.summary,
        "parameters": headers,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schemas[str(one.body)]}}},
        "responses": {"2XX": {"description": "The event is accepted."}},
    }


def _content(one: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    if one.events:
        described = {name: schemas[str(kind)] for name, kind in one.events.items()}
        return {"content": {"text/event-stream": {"schema": {"type": "string"}, "x-events": described}}}
    if one.answer is not None:
        return {"content": {"application/json": {"schema": schemas[str(one.answer)]}}}
    return {}
