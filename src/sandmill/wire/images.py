"""Images, as every process speaks of them."""

import msgspec


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an OCI image configuration that a sandbox obeys."""

    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    entrypoint: list[str] = []
    cmd: list[str] = []
    volumes: list[str] = []
    labels: dict[str, str] = {}


class ImageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An image in the store."""

    id: str
    names: list[str] = []
    layers: list[str] = []
    config: ImageConfig = ImageConfig()
    size_bytes: int = 0
    created_at: float = 0.0
    last_used_at: float = 0.0
    in_use: int = 0
    warnings: list[str] = []


class PulledLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer of an image that is being pulled; sizes as it travels, compressed."""

    digest: str
    size_bytes: int = 0
    read_bytes: int = 0
    done: bool = False
    """It is in the store."""


class Pulling(msgspec.Struct, frozen=True, kw_only=True):
    """A pull that goes on. `layers` is empty until the manifest is there."""

    name: str
    layers: list[PulledLayer] = []


class RemovedImage(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    names: list[str] = []
    size_bytes: int = 0
    last_used_at: float = 0.0


class Collection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which unused images should go, those first that were used longest ago. Empty: what the server's marks say."""

    all: bool = False
    """Every one that can be had again, however full the disk is."""
    imported: bool = False
    """Those, too, that were imported from a file and can't be had again by themselves."""
    unused_for_s: float = 0.0
    target_percent: float | None = None
    """Until no more of the file system than this is used."""
    dry_run: bool = False


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What went; how full the file system of the images is now, as `df` counts."""

    removed: list[RemovedImage] = []
    used_percent: float = 0.0
    free_bytes: int = 0
