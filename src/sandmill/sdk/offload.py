"""Blocking control calls of asyncio programs, in threads of their own.

The loop's default pool has a few threads a core and is everybody's: a job that makes a thousand sandboxes would wait
for it, and so would whatever else the program does there.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MOST = 64
"""Control calls at once; a thread is made when it is needed."""

_pool = ThreadPoolExecutor(MOST, "sandmill-control")


def _after_fork() -> None:
    global _pool
    _pool = ThreadPoolExecutor(MOST, "sandmill-control")


os.register_at_fork(after_in_child=_after_fork)


async def offload(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a call that can't be interrupted; when cancelled it goes on by itself, if it has begun."""
    return await asyncio.get_running_loop().run_in_executor(_pool, lambda: call(*args, **kwargs))


async def make(call: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Runs a call that makes something. When cancelled, what it made or still makes is undone, even if the loop ends."""
    lock = threading.Lock()
    made: list[T] = []
    unwanted = False

    def run() -> T:
        it = call()
        with lock:
            made.append(it)
            nobody = unwanted
        if nobody:
            undo(it)
        return it

    try:
        return await asyncio.get_running_loop().run_in_executor(_pool, run)
    except asyncio.CancelledError:
        with lock:
            unwanted = True
            there = list(made)
        for it in there:
            _pool.submit(undo, it)
        raise
