"""Describe a JSON service at GET /openapi.json, for people and programs."""

import re
from collections.abc import Mapping
from types import MappingProxyType

PATH = "/openapi.json"
BODY_ERRORS = {  # {status: reason}, for every route that takes a body
    400: "the body is not JSON, or not as described",
    408: "the body did not arrive in time",
    411: "Content-Length is missing",
    413: "the body is too long, or the reply would be",
    415: "Content-Type is not application/json",
    422: "a text is too long, or cannot be used as input",
}
COMMON_ERRORS = {  # {status: reason}, for every route
    401: "Authorization: Bearer ... is missing or wrong",
    403: "the Host header names another machine, and the service has no token",
    500: "a fault of the service",
    503: "too many requests at once, or the search failed: try again later",
}
TEXT = {"type": "string"}
NAME = {**TEXT, "pattern": "^[A-Za-z0-9._-]{1,64}$"}  # in a path
HEALTH = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"const": "ok"}},
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": TEXT},
    "additionalProperties": False,
}
ERROR_REF = {"$ref": "#/components/schemas/Error"}


class Content(dict):
    """The {content type: schema} of a reply that is not always JSON."""


def with_description(
    routes: Mapping,
    title: str,
    described: Mapping,
    *,
    errors: Mapping[str, tuple[Mapping, Mapping]] = MappingProxyType({}),
) -> dict:
    """Return the routes, with /health and /openapi.json added to them.

    Args:
        routes: routes as `rsearch.runtime.server.JsonServer` takes them.
        described: {(method, path): (summary, schema of the body, schema of the reply)}
            of the same routes; the schema of a reply may be a Content.
        errors: {prefix of paths: (schema of their error replies, {status: reason} in
            addition to the common ones)}, for paths whose errors differ.
    """
    assert routes.keys() == described.keys()
    operations = {
        **described,
        ("GET", "/health"): ("Whether the service is running.", None, HEALTH),
        ("GET", PATH): ("This description.", None, {"type": "object"}),
    }
    paths = {}
    for (method, path), (summary, body, reply) in operations.items():
        prefixes = [prefix for prefix in errors if path.startswith(prefix)]
        error_schema, statuses = errors[prefixes[0]] if prefixes else (ERROR_REF, {})
        operation = _operation(summary, body, reply, error_schema, statuses)
        if names := re.findall(r"\{(\w+)\}", path):
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": NAME}
                for name in names
            ]
            operation["responses"]["404"] = {
                "description": "the path holds no such name",
                "content": _json(ERROR_REF),
            }
        paths.setdefault(path, {})[method.lower()] = operation
    document = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],  # a token, if the service has one
    }
    return {
        **routes,
        ("GET", "/health"): lambda body: {"status": "ok"},
        ("GET", PATH): lambda body: document,
    }


def record(required: Mapping, optional: Mapping | None = None, **settings) -> dict:
    """Return the schema of an object with these fields, and possibly others."""
    properties = {**required, **(optional or {})}
    fields = {"required": list(required), "properties": properties}
    return {"type": "object", **fields, **settings}


def list_of(items: Mapping, **settings) -> dict:
    """Return the schema of a list."""
    return {"type": "array", "items": items, **settings}


def _operation(summary, body, reply, error_schema, statuses):
    errors = COMMON_ERRORS | (BODY_ERRORS if body is not None else {}) | statuses
    replies = {200: ("what was asked for", reply)}
    replies |= {status: (reason, error_schema) for status, reason in errors.items()}
    operation = {
        "summary": summary,
        "responses": {
            str(status): {"description": reason, "content": _content(schema)}
            for status, (reason, schema) in sorted(replies.items())
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json(body)}
    return operation


def _content(schema):
    if isinstance(schema, Content):
        return {kind: {"schema": inner} for kind, inner in schema.items()}
    return _json(schema)


def _json(schema):
    return {"application/json": {"schema": schema}}
