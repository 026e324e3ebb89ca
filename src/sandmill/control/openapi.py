"""The OpenAPI 3.1 document, from the table of routes: what is served is what is documented."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from sandmill.control.routes import Route


class Error(msgspec.Struct, frozen=True):
    """Sandmill's error. `retryable`: the same call can work later."""

    code: str
    message: str
    hint: str | None = None
    retryable: bool = False
    details: dict[str, Any] = {}


class E2bError(msgspec.Struct, frozen=True):
    """E2B's error, with Sandmill's fields beside it; `code` is the HTTP status."""

    code: int
    message: str
    error_code: str
    hint: str | None = None
    retryable: bool = False
    details: dict[str, Any] = {}


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    from sandmill.control.version import version

    types: list[Any] = [Error, E2bError]
    for route in routes:
        types += [kind for kind in (route.body, route.answer) if kind is not None and kind not in types]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = [(kind, schema) for kind, schema in zip(types, schemas, strict=True)]

    def schema_of(kind: Any) -> Any:
        return next(schema for other, schema in by_type if other is kind or other == kind)

    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sandmill",
            "version": version(),
            "description": "The control API: E2B's routes at the root, Sandmill's own under /v1.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
                "bearer": {"type": "http", "scheme": "bearer"},
            },
        },
        "security": [{"key": []}, {"bearer": []}],
    }


def _operation(route: Route, schema_of: Any) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": route.summary,
        "tags": ["E2B" if route.dialect == "e2b" else "Sandmill"],
        "parameters": _parameters(route),
        "responses": _responses(route, schema_of),
    }
    if route.body is not None:
        content = {"application/json": {"schema": schema_of(route.body)}}
        operation["requestBody"] = {"required": True, "content": content}
    if route.dialect == "open":
        operation["security"] = []
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    parameters += [
        {
            "name": query.name,
            "in": "query",
            "required": False,
            "description": query.about,
            "schema": {"type": query.kind},
        }
        for query in route.query
    ]
    if route.method == "POST" and route.path in ("/sandboxes", "/v2/sandboxes", "/v1/sandboxes"):
        parameters.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "description": "The same key with the same body gives the same sandbox",
                "schema": {"type": "string", "minLength": 1, "maxLength": 255},
            }
        )
    return parameters


def _responses(route: Route, schema_of: Any) -> dict[str, Any]:
    done: dict[str, Any] = {"description": HTTPStatus(route.status).phrase}
    if route.answer is not None and route.status != 204:
        done["content"] = {"application/json": {"schema": schema_of(route.answer)}}
    responses = {str(route.status): done}
    error = schema_of(E2bError if route.dialect == "e2b" else Error)
    always = () if route.dialect == "open" else (401, 503)
    for status in sorted({*route.errors, *always}):
        content = {"application/json": {"schema": error}}
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": content}
    return responses
