"""An image that is asked for and not here comes from its registry."""

from sandmill.backends.base import Backend
from sandmill.errors import ImageError, NotFoundError
from sandmill.wire import ImageInfo

OURS = ("env:", "sha256:", "host:")
"""How names begin that no registry has: prepared environments, ids."""


async def pulled(backend: Backend, name: str, *, newest: bool = False) -> ImageInfo:
    """The image called `name`, from its registry unless it is here (`newest`: the registry's even then).

    Raises NotFoundError, ImageError and UsageError, which say that it is not here, either.
    """
    if name == "host" or name.startswith(OURS):
        return await backend.image(name)
    try:
        return await backend.pull_image(name, newest=newest)
    except (NotFoundError, ImageError) as error:
        message = f"there is no image {name!r} here, and it can't be pulled: {error.message}"
        raise type(error)(
            message, code=error.code, hint=error.hint, retryable=error.retryable, details=error.details,
            status=error.status,
        ) from error  # fmt: skip
