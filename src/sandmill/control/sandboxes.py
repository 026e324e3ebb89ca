"""The use cases of sandboxes: decide synchronously over what is known here, then ask the backend.

The backend is the truth about what runs. Here is known what each was made for, which creates and kills are under way, and
who waits for them. Nothing is awaited between a look at that state and its change.
"""

import asyncio
import logging
import secrets
import string
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from sandmill.backends.base import Backend
from sandmill.control.pulling import pulled
from sandmill.control.store import Record, Store
from sandmill.errors import (
    ConflictError,
    NotFoundError,
    SandboxGoneError,
    SandmillError,
    UsageError,
)
from sandmill.wire import ImageInfo, Lease, LimitSpec, SandboxEnd, SandboxInfo, SandboxSpec, Usage

ADOPT_S: Final = 20.0
"""How long a create whose client went away waits for a retry with the same idempotency key before it is undone."""
UNDO_S: Final = 120.0
"""How long ending a sandbox that nobody wants is tried; its lease ends it after that."""
TOMBSTONE_S: Final = 24 * 3600.0
MOST_TOMBSTONES: Final = 20_000
LIST_AGE_S: Final = 0.25
"""How old the backend's list may be that expiry times in listings come from."""
HOUSEKEEPING_S: Final = 1.0

_ALPHABET: Final = string.ascii_lowercase + string.digits

T = TypeVar("T")

log = logging.getLogger("sandmill.sandboxes")


def new_id() -> str:
    """`i` and 19 characters of a-z0-9, 98 bits of chance."""
    number = int.from_bytes(secrets.token_bytes(16))
    letters = []
    for _ in range(19):
        number, digit = divmod(number, 36)
        letters.append(_ALPHABET[digit])
    return "i" + "".join(letters)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A create, as either dialect asks for it."""

    image: str
    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    network: str = "none"
    limits: LimitSpec = LimitSpec()
    lease: Lease = Lease(300.0)
    metadata: dict[str, str] = {}
    name: str | None = None
    template: str | None = None
    internet_asked: bool | None = None
    plain_disk: bool = False
    pull: Literal["missing", "always", "never"] = "missing"

    @property
    def fingerprint(self) -> str:
        """The same for the same request."""
        import hashlib

        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()


class View(NamedTuple):
    """A sandbox that runs: what it was made for, and how it is."""

    record: Record
    info: SandboxInfo


class Page(NamedTuple):
    views: list[View]
    cursor: str | None


@dataclass(eq=False)
class _Create:
    """A create under way, or done and not yet known to be wanted."""

    slot: str
    """Its idempotency key, else the sandbox's id."""
    keyed: bool
    fingerprint: str | None
    task: "asyncio.Task[View]"
    waiters: int = 0
    abandoned: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class _Live:
    """A sandbox that runs, as far as we know."""

    record: Record
    info: SandboxInfo
    ending: "asyncio.Task[None] | None" = None
    cause: str = "killed"
    """Why it is being ended, while it is."""


@dataclass(frozen=True)
class Statistics:
    live: int
    creating: int
    ending: int
    tombstones: int
    idempotency_keys: int


@dataclass(eq=False)
class Sandboxes:
    """All sandboxes of one backend. Made, then `start`ed; `close` stops its housekeeping and nothing else."""

    backend: Backend
    store: Store
    now: Callable[[], float] = time.time
    _live: dict[str, _Live] = field(default_factory=dict)
    _order: list[tuple[float, str]] = field(default_factory=list)
    """(created_at, id) of the live, sorted: what paging goes along."""
    _gone: "OrderedDict[str, tuple[SandboxEnd, str | None]]" = field(default_factory=OrderedDict)
    """Tombstones with their idempotency keys, oldest first."""
    _keys: dict[str, str] = field(default_factory=dict)
    """Idempotency key to id, of creates that were answered."""
    _creates: dict[str, _Create] = field(default_factory=dict)
    """By idempotency key (or a name of its own): under way, or waiting to be adopted."""
    _tasks: "set[asyncio.Task[Any]]" = field(default_factory=set)
    _listed: tuple[float, "asyncio.Task[None] | None"] = (float("-inf"), None)
    _fingerprints: dict[str, str | None] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Sandboxes {self.statistics()}>"

    def statistics(self) -> Statistics:
        ending = sum(1 for live in self._live.values() if live.ending is not None)
        return Statistics(len(self._live), len(self._creates), ending, len(self._gone), len(self._keys))

    # Life of the service

    async def start(self) -> None:
        """Brings the store and the backend together. Raises what the backend raises."""
        for kept in self.store.load():
            record = kept.record
            if record.key is not None:
                self._keys[record.key] = record.id
                self._fingerprints[record.id] = record.fingerprint
            if kept.end is not None:
                self._gone[record.id] = (kept.end, record.key)
        await self.reconcile()
        self._spawn(self._housekeeping())

    async def close(self) -> None:
        """Stops what goes on in the background. What undoes an unwanted create gets two seconds more."""
        for create in self._creates.values():
            if create.abandoned is not None:
                create.abandoned.cancel()
        self._creates.clear()
        undoing = [task for task in self._tasks if task.get_name().startswith("undo")]
        if undoing:
            await asyncio.wait(undoing, timeout=2.0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.store.flush()

    async def reconcile(self) -> None:
        """The backend's list against ours: what we don't know is ended, what it doesn't know has a tombstone.

        At the start and whenever events may have been missed. Raises what the backend raises.
        """
        ours = {kept.record.id: kept for kept in self.store.load() if kept.end is None}
        listing = await self.backend.inventory()
        there = {info.id: info for info in listing.live}
        ended = {end.id: end for end in listing.ended}
        under_way = {create.task.get_name() for create in self._creates.values() if not create.task.done()}
        for one, info in there.items():
            if one in self._live:
                self._live[one].info = info
            elif one in ours:
                self._add(ours[one].record, info)
            elif one not in under_way:
                log.warning("ending %s: it runs here, but nobody is known to have asked for it", one)
                self._undo(one)
        for one in ours:
            if one not in there:
                message = "it ended while nobody looked; the node was restarted or the machine rebooted"
                lost = SandboxEnd(id=one, cause="node_restarted", message=message, ended_at=self.now())
                self._bury(ended.get(one) or lost)

    # Creates

    async def create(self, wanted: Wanted, key: str | None = None) -> View:
        """Makes a sandbox.

        With a key: the same request again gives the same sandbox, also while the first is under way. Raises ConflictError
        for another request with the same key, SandboxGoneError if the sandbox of that key has ended since, and what the
        backend raises. A cancelled create is undone (with a key: unless a retry takes it over within ADOPT_S).
        """
        fingerprint = None if key is None else wanted.fingerprint
        create = self._decide(wanted, key, fingerprint)
        if isinstance(create, str):
            return await self.get(create)
        if create.abandoned is not None:
            create.abandoned.cancel()
            create.abandoned = None
        create.waiters += 1
        try:
            view = await asyncio.shield(create.task)
        except asyncio.CancelledError:
            if create.waiters == 1:
                self._abandon(create)
            raise
        finally:
            create.waiters -= 1
        self._settle(create)
        return view

    def _decide(self, wanted: Wanted, key: str | None, fingerprint: str | None) -> _Create | str:
        """The create to wait for, or the id of the sandbox that this key has made."""
        if key is not None:
            under_way = self._creates.get(key)
            if under_way is not None:
                if under_way.fingerprint != fingerprint:
                    raise _key_conflict(key)
                return under_way
            made = self._keys.get(key)
            if made is not None:
                if self._fingerprints.get(made) != fingerprint:
                    raise _key_conflict(key)
                return made
        record = Record(
            id=new_id(),
            image=wanted.image,
            token=secrets.token_hex(16),
            created_at=self.now(),
            network=wanted.network,
            metadata=wanted.metadata,
            name=wanted.name,
            template=wanted.template,
            internet_asked=wanted.internet_asked,
            workdir=wanted.workdir,
            user=wanted.user,
            key=key,
            fingerprint=fingerprint,
        )
        slot = key if key is not None else record.id
        task = asyncio.get_running_loop().create_task(self._make(record, wanted, slot), name=record.id)
        create = self._creates[slot] = _Create(slot, key is not None, fingerprint, task)
        return create

    async def _make(self, record: Record, wanted: Wanted, slot: str) -> View:
        spec = SandboxSpec(
            id=record.id,
            image=wanted.image,
            token=record.token,
            env=wanted.env,
            workdir=wanted.workdir,
            user=wanted.user,
            network=wanted.network,
            limits=wanted.limits,
            lease=wanted.lease,
            plain_disk=wanted.plain_disk,
        )
        try:
            info = await self._create_on_node(spec, wanted.pull)
            self.store.add(record)
        except BaseException as error:
            self._creates.pop(slot, None)
            if not isinstance(error, (UsageError, NotFoundError)):
                self._undo(record.id)  # it may be there
            raise
        self._add(record, info)
        if record.key is not None:
            self._keys[record.key] = record.id
            self._fingerprints[record.id] = record.fingerprint
        return View(record, info)

    async def _create_on_node(self, spec: SandboxSpec, pull: str) -> SandboxInfo:
        """As the backend's create; an image that is not here comes from its registry if it may."""
        if pull == "always":
            await pulled(self.backend, spec.image, newest=True)
        try:
            return await self.backend.create(spec)
        except NotFoundError as error:
            if pull == "never" or error.code != "image_not_found":
                raise
            await pulled(self.backend, spec.image)
        return await self.backend.create(spec)

    def _settle(self, create: _Create) -> None:
        if self._creates.get(create.slot) is create:
            del self._creates[create.slot]

    def _abandon(self, create: _Create) -> None:
        """Nobody waits for this create any more: undone, with a key only if no retry comes for it."""
        if create.keyed:
            create.abandoned = asyncio.get_running_loop().call_later(ADOPT_S, self._give_up, create)
        else:
            self._give_up(create)

    def _give_up(self, create: _Create) -> None:
        self._settle(create)
        if create.task.done():
            self._undo_result(create.task)
        else:
            create.task.add_done_callback(self._undo_result)

    def _undo_result(self, task: "asyncio.Task[View]") -> None:
        if not task.cancelled() and task.exception() is None:
            self._undo(task.result().record.id)

    def undelivered(self, sandbox_id: str) -> None:
        """The answer to a create did not reach its client: undone, unless a retry with its key comes for it."""
        live = self._live.get(sandbox_id)
        if live is None:
            return
        if live.record.key is None:
            self._undo(sandbox_id)
            return
        # As if it were under way again, and abandoned at once.
        done: asyncio.Task[View] = asyncio.get_running_loop().create_task(
            _value(View(live.record, live.info)), name=sandbox_id
        )
        key = live.record.key
        create = self._creates[key] = _Create(key, True, live.record.fingerprint, done)
        self._abandon(create)

    # What there is

    async def get(self, sandbox_id: str) -> View:
        """Raises NotFoundError, or SandboxGoneError with the cause."""
        live = self._find(sandbox_id)
        if live.ending is None:
            try:
                live.info = await self.backend.get(sandbox_id)
            except (NotFoundError, SandboxGoneError) as error:
                self._bury(_end_of(error, sandbox_id, self.now()))
                raise self._gone_error(sandbox_id) from error
        live = self._find(sandbox_id)
        if live.ending is not None:
            raise self._ending_error(live)
        return View(live.record, live.info)

    async def page(
        self,
        metadata: dict[str, str],
        limit: int,
        cursor: str | None,
        newest_first: bool = True,
        where: Callable[[Record], bool] | None = None,
    ) -> Page:
        """A page of those that run. A sandbox that runs throughout a sweep over all pages is in it exactly once."""
        await self._refresh()
        after = _position(cursor)
        if newest_first:
            stop = len(self._order) if after is None else bisect_left(self._order, after)
            candidates: Iterable[tuple[float, str]] = (self._order[at] for at in range(stop - 1, -1, -1))
        else:
            begin = 0 if after is None else bisect_left(self._order, (after[0], after[1] + "\0"))
            candidates = (self._order[at] for at in range(begin, len(self._order)))
        views: list[View] = []
        for _, one in candidates:
            live = self._live[one]
            record = live.record
            if live.ending is not None or any(record.metadata.get(name) != value for name, value in metadata.items()):
                continue
            if where is not None and not where(record):
                continue
            if len(views) == limit:
                last = views[-1].record
                return Page(views, f"{last.created_at!r}:{last.id}")
            views.append(View(record, live.info))
        return Page(views, None)

    async def _refresh(self) -> None:
        """Takes expiry times from the backend's list, at most four times a second however many ask."""
        loop = asyncio.get_running_loop()
        at, task = self._listed
        if task is None or (task.done() and loop.time() - at > LIST_AGE_S):
            task = loop.create_task(self._relist())
            self._listed = (loop.time(), task)
        await asyncio.shield(task)

    async def _relist(self) -> None:
        for info in (await self.backend.inventory()).live:
            live = self._live.get(info.id)
            if live is not None:
                live.info = info

    # Their end

    async def kill(self, sandbox_id: str, cause: str = "killed") -> None:
        """Ends a sandbox; returns when nothing of it is left. Goes on if the caller is cancelled.

        Raises NotFoundError or SandboxGoneError unless this call ended it: of many, one succeeds.
        """
        live = self._find(sandbox_id)
        if live.ending is not None:
            await asyncio.shield(live.ending)
            raise self._gone_error(sandbox_id)
        live.cause = cause
        live.ending = self._spawn(self._end(live, cause))
        await asyncio.shield(live.ending)

    async def _end(self, live: _Live, cause: str) -> None:
        one = live.record.id
        try:
            await self.backend.destroy(one, cause)
        except (NotFoundError, SandboxGoneError) as error:
            self._bury(_end_of(error, one, self.now()))
            raise self._gone_error(one) from error
        except BaseException:
            live.ending = None
            raise
        self._bury(SandboxEnd(id=one, cause=cause, message="ended on request", ended_at=self.now()))

    def note_end(self, end: SandboxEnd) -> None:
        """The backend said so."""
        if end.id in self._live:
            self._bury(end)

    def bury_all(self, message: str) -> None:
        """They end with the node: tombstones for all."""
        for one in list(self._live):
            self._bury(SandboxEnd(id=one, cause="killed", message=message, ended_at=self.now()))

    # Leases, usage, commits

    async def renew(self, sandbox_id: str, ttl_s: float, renew_on_use: bool | None = None) -> View:
        """From now on `ttl_s` seconds. Raises NotFoundError, SandboxGoneError, UsageError."""
        live = self._running(sandbox_id)
        await self._ask(sandbox_id, self.backend.set_lease(sandbox_id, ttl_s, renew_on_use))
        live.info = msgspec.structs.replace(live.info, expires_at=self.now() + ttl_s)
        return View(live.record, live.info)

    async def extend(self, sandbox_id: str, ttl_s: float) -> View:
        """As `renew`, but never to an earlier time."""
        view = await self.get(sandbox_id)
        if self.now() + ttl_s <= view.info.expires_at:
            return view
        return await self.renew(sandbox_id, ttl_s)

    async def renew_many(self, leases: dict[str, float]) -> list[str]:
        """Renews those that run; returns the ids of the others."""
        ours = {one: ttl_s for one, ttl_s in leases.items() if one in self._live and self._live[one].ending is None}
        gone = [one for one in leases if one not in ours]
        if ours:
            gone += await self.backend.renew(ours)
        return gone

    async def usage(self, sandbox_id: str) -> Usage:
        self._running(sandbox_id)
        return await self._ask(sandbox_id, self.backend.usage(sandbox_id))

    async def commit(self, sandbox_id: str, name: str | None, config: dict[str, Any] | None = None) -> ImageInfo:
        """Ends the sandbox and keeps its changes as an image. Goes on if the caller is cancelled."""
        live = self._running(sandbox_id)

        async def commit() -> ImageInfo:
            image = await self._ask(sandbox_id, self.backend.commit(sandbox_id, name, config))
            self._bury(SandboxEnd(id=sandbox_id, cause="committed", message=f"became {image.id}", ended_at=self.now()))
            return image

        task = self._spawn(commit())
        ending: asyncio.Task[None] = self._spawn(_done(task))
        live.cause, live.ending = "committed", ending
        try:
            return await asyncio.shield(task)
        except SandmillError:
            if self._live.get(sandbox_id) is live and live.ending is ending:
                live.ending = None
            raise

    # Inside

    def _find(self, sandbox_id: str) -> _Live:
        live = self._live.get(sandbox_id)
        if live is None:
            raise self._gone_error(sandbox_id)
        return live

    def _running(self, sandbox_id: str) -> _Live:
        live = self._find(sandbox_id)
        if live.ending is not None:
            raise self._ending_error(live)
        return live

    @staticmethod
    def _ending_error(live: _Live) -> SandboxGoneError:
        one = live.record.id
        return SandboxGoneError(
            f"sandbox {one} is being ended ({live.cause})",
            details={"id": one, "cause": live.cause, "message": "right now"},
        )

    async def _ask(self, sandbox_id: str, question: Coroutine[Any, Any, T]) -> T:
        """Asks the backend about one sandbox; what it says of its end is noted."""
        try:
            return await question
        except (NotFoundError, SandboxGoneError) as error:
            if error.code in ("sandbox_not_found", "sandbox_gone"):
                self._bury(_end_of(error, sandbox_id, self.now()))
                raise self._gone_error(sandbox_id) from error
            raise

    def _gone_error(self, sandbox_id: str) -> SandmillError:
        found = self._gone.get(sandbox_id)
        if found is None:
            return NotFoundError(
                f"there is no sandbox {sandbox_id[:64]!r}",
                code="sandbox_not_found",
                hint="`sandmill ls` shows those that run; what ended is forgotten after a day",
            )
        end, _ = found
        why = f": {end.message}" if end.message else ""
        return SandboxGoneError(f"sandbox {sandbox_id} has ended ({end.cause}{why})", details=msgspec.to_builtins(end))

    def _add(self, record: Record, info: SandboxInfo) -> None:
        if record.id not in self._live:
            place = (record.created_at, record.id)
            self._order.insert(bisect_left(self._order, place), place)
        self._live[record.id] = _Live(record, info)

    def _bury(self, end: SandboxEnd) -> None:
        """It runs no more; the first word about why counts."""
        live = self._live.pop(end.id, None)
        if live is not None:
            place = (live.record.created_at, end.id)
            at = bisect_left(self._order, place)
            if at < len(self._order) and self._order[at] == place:
                del self._order[at]
        if end.id not in self._gone:
            key = (
                live.record.key
                if live is not None
                else next((k for k, one in self._keys.items() if one == end.id), None)
            )
            self._gone[end.id] = (end, key)
            self.store.end(end)

    def _undo(self, sandbox_id: str) -> None:
        """Ends a sandbox that nobody wants, in the background."""
        self._spawn(self._undo_until_done(sandbox_id), name=f"undo {sandbox_id}")

    async def _undo_until_done(self, sandbox_id: str) -> None:
        deadline = asyncio.get_running_loop().time() + UNDO_S
        pause = 0.05
        while True:
            try:
                if sandbox_id in self._live:
                    await self.kill(sandbox_id)
                else:
                    await self.backend.destroy(sandbox_id, "killed")
                return
            except (NotFoundError, SandboxGoneError):
                return
            except SandmillError as error:
                if asyncio.get_running_loop().time() > deadline:
                    log.warning("cannot end %s (%s); its lease will", sandbox_id, error)
                    return
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)

    def _spawn(self, work: Any, name: str | None = None) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, SandmillError):
            log.error("in the background", exc_info=error)

    async def _housekeeping(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self.prune()
            self.store.flush()

    def prune(self) -> None:
        """Forgets tombstones, and the keys of what they stand for, after a day or beyond the bound."""
        old = self.now() - TOMBSTONE_S
        forgotten = []
        while self._gone:
            one, (end, key) = next(iter(self._gone.items()))
            if end.ended_at > old and len(self._gone) <= MOST_TOMBSTONES:
                break
            del self._gone[one]
            self._fingerprints.pop(one, None)
            if key is not None and self._keys.get(key) == one:
                del self._keys[key]
            forgotten.append(one)
        if forgotten:
            self.store.forget(forgotten)


async def _value(view: View) -> View:
    return view


async def _done(task: "asyncio.Task[ImageInfo]") -> None:
    await asyncio.wait([task])


def _key_conflict(key: str) -> ConflictError:
    return ConflictError(
        f"the idempotency key {key[:64]!r} was used for another request",
        code="idempotency_conflict",
        hint="a key stands for one request; make a new one for each",
    )


def _position(cursor: str | None) -> tuple[float, str] | None:
    if not cursor:
        return None
    created_at, colon, one = cursor.partition(":")
    try:
        if colon:
            return float(created_at), one
    except ValueError:
        pass
    raise UsageError(f"{cursor[:64]!r} is no cursor", hint="pass on what the page before gave")


def _end_of(error: SandmillError, sandbox_id: str, now: float) -> SandboxEnd:
    """The end that an answer of the backend tells of."""
    try:
        return msgspec.convert({"id": sandbox_id, **error.details}, SandboxEnd)
    except msgspec.ValidationError:
        return SandboxEnd(id=sandbox_id, cause="node_restarted", message="the node knows nothing of it", ended_at=now)
