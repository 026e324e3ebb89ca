"""The API key: who may call."""

import hmac

from sandmill.control.http import Request
from sandmill.errors import AuthError


class ApiKey:
    """Checks that a request carries the key: `X-API-Key`, or `Authorization: Bearer`."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def check(self, request: Request) -> None:
        """Raises AuthError."""
        given = request.headers.get(b"x-api-key")
        if given is None:
            scheme, _, bearer = request.headers.get(b"authorization", b"").partition(b" ")
            given = bearer.strip() if scheme.lower() == b"bearer" else None
        if given is None:
            raise AuthError(
                "the API key is missing",
                hint="send it as the header X-API-Key; the server says where it keeps it when it starts",
            )
        if not hmac.compare_digest(given, self._key):
            raise AuthError("the API key is wrong", hint="the server says where it keeps it when it starts")
