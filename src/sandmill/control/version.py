"""The version of this installation."""

from functools import cache


@cache
def version() -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("sandmill")
    except PackageNotFoundError:  # a source tree on the path
        return "0+source"
