"""The application: every route, who may call it, and errors in the dialect of the caller."""

import asyncio
import logging
from typing import Any

from sandmill.control import failures
from sandmill.control.auth import ApiKey
from sandmill.control.e2b import E2b
from sandmill.control.environments import Environments
from sandmill.control.http import Answer, Request
from sandmill.control.native import Native
from sandmill.control.node import Node
from sandmill.control.routes import BODY_LIMIT_BYTES, Call, Dialect, Route, Router
from sandmill.control.sandboxes import Sandboxes
from sandmill.errors import NotFoundError, SandmillError, ServerError, UsageError

log = logging.getLogger("sandmill.app")


class App:
    """Answers requests; implements `http.Application`."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        environments: Environments,
        node: Node,
        key: str,
        *,
        data_url: str,
        domain: str | None = None,
    ) -> None:
        self._key = ApiKey(key)
        native = Native(sandboxes, environments, node, data_url)
        e2b = E2b(sandboxes, node, domain)
        about = Route("GET", "/openapi.json", self.openapi, "The OpenAPI document", "open", answer=dict[str, Any])
        self.router = Router([*native.routes(), *e2b.routes(), about])
        self._document = b""

    @property
    def routes(self) -> tuple[Route, ...]:
        return self.router.routes

    async def openapi(self, call: Call, _: None) -> Answer:
        if not self._document:
            import msgspec

            from sandmill.control.openapi import describe

            self._document = msgspec.json.encode(describe(self.routes))
        return Answer(200, self._document)

    def body_limit(self, method: str, path: str) -> int:
        route, _, _ = self.router.find(method, path)
        return BODY_LIMIT_BYTES if route is None else route.body_limit_bytes

    def refusal(self, status: int, code: str, message: str) -> Answer:
        return failures.answer(UsageError(message, code=code, status=status), "native")

    async def answer(self, request: Request) -> Answer:
        route, params, methods = self.router.find(request.method, request.path)
        dialect: Dialect = route.dialect if route is not None else _dialect(request.path)
        try:
            if dialect != "open":
                self._key.check(request)
            if route is not None:
                return await route.run(request, params)
            if methods:
                raise UsageError(
                    f"{request.method} is no call of {request.path}",
                    code="method_not_allowed",
                    hint=f"it takes {', '.join(methods)}",
                )
            raise NotFoundError(
                f"{request.method} {request.path[:200]} is no call of this server",
                code="unknown_call",
                hint="GET /openapi.json lists them",
            )
        except asyncio.CancelledError:
            raise
        except SandmillError as error:
            return failures.answer(error, dialect)
        except Exception:
            # The one place that catches everything: a bug of ours is an answer, not a broken connection.
            log.exception("%s %s", request.method, request.path)
            return failures.answer(
                ServerError("a bug of sandmill: the server's log has its trace", hint="please report it"), dialect
            )


def _dialect(path: str) -> Dialect:
    return "native" if path.startswith("/v1/") else "e2b"
