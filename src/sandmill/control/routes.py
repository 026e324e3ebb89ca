"""Routes as data: one table drives the matching, the decoding, the OpenAPI document and the test that compares them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import parse_qsl

import msgspec

from sandmill.control.http import Answer, Request, segments
from sandmill.errors import UsageError

Dialect = Literal["e2b", "native", "open"]

BODY_LIMIT_BYTES: Final = 4 * 1024 * 1024

_encode = msgspec.json.Encoder().encode


class Call:
    """One call of a route: the request, what its path and query say."""

    __slots__ = ("_query", "params", "request")

    def __init__(self, request: Request, params: dict[str, str]) -> None:
        self.request = request
        self.params = params
        self._query: list[tuple[str, str]] | None = None

    @property
    def query(self) -> list[tuple[str, str]]:
        if self._query is None:
            self._query = parse_qsl(self.request.query, keep_blank_values=True)
        return self._query

    def text(self, name: str) -> str | None:
        return next((value for key, value in self.query if key == name), None)

    def integer(self, name: str, default: int, lowest: int, highest: int) -> int:
        """Raises UsageError unless it is a number in the range."""
        text = self.text(name)
        if text is None or text == "":
            return default
        if not text.isascii() or not text.lstrip("-").isdigit() or not lowest <= int(text) <= highest:
            raise UsageError(f"{name}={text!r} is not a number from {lowest} to {highest}")
        return int(text)


Handler = Callable[[Call, Any], Awaitable[Any]]


@dataclass(frozen=True)
class Query:
    """A query parameter, for the document."""

    name: str
    about: str
    kind: Literal["string", "integer"] = "string"


@dataclass(frozen=True)
class Route:
    """One route. `handler(call, body)` returns the answer's content (or an Answer, as it is)."""

    method: str
    path: str
    handler: Handler
    summary: str
    dialect: Dialect
    body: Any = None
    """Type of the body; None: no body is read."""
    answer: Any = None
    """Type of the answer's content."""
    status: int = 200
    query: Sequence[Query] = ()
    errors: Sequence[int] = ()
    body_limit_bytes: int = BODY_LIMIT_BYTES
    decoder: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.body is not None:
            object.__setattr__(self, "decoder", msgspec.json.Decoder(self.body))

    async def run(self, request: Request, params: dict[str, str]) -> Answer:
        """Decodes, calls, encodes. Raises what the handler raises, and UsageError for a body that isn't right."""
        body = None
        if self.decoder is not None:
            try:
                body = self.decoder.decode(request.body or b"{}")
            except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
                raise UsageError(f"the request's body: {error}", hint="GET /openapi.json describes it") from error
        content = await self.handler(Call(request, params), body)
        if isinstance(content, Answer):
            return content
        if self.status == 204:
            return Answer(204)
        return Answer(self.status, _encode(content))


class _Node:
    __slots__ = ("children", "name", "param", "routes")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.param: _Node | None = None
        self.name = ""
        self.routes: dict[str, Route] = {}


class Router:
    """Finds the route of a request: literal segments win over parameters."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)
        self._root = _Node()
        self._literal: dict[tuple[str, str], Route] = {}
        for route in routes:
            self._add(route)

    def _add(self, route: Route) -> None:
        node = self._root
        for part in segments(route.path):
            if part.startswith("{"):
                node.param = node.param or _Node()
                node = node.param
                node.name = part[1:-1]
            else:
                node = node.children.setdefault(part, _Node())
        assert route.method not in node.routes, f"{route.method} {route.path} is there twice"
        node.routes[route.method] = route
        if "{" not in route.path:
            self._literal[route.method, route.path] = route

    def find(self, method: str, path: str) -> tuple[Route | None, dict[str, str], list[str]]:
        """The route and its parameters; if there is none, the methods that the path does have."""
        route = self._literal.get((method, path))
        if route is not None:
            return route, {}, []
        node: _Node | None = self._root
        params: dict[str, str] = {}
        for part in segments(path):
            assert node is not None
            following = node.children.get(part)
            if following is None and node.param is not None and part:
                following = node.param
                params[following.name] = part
            if following is None:
                return None, {}, []
            node = following
        assert node is not None
        return node.routes.get(method), params, sorted(node.routes)
