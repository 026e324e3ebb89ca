"""Control calls in threads: what is cancelled is undone, once, whenever that comes."""

import asyncio
import queue
import threading

import pytest

from sandmill.sdk.offload import MOST, make, offload

WAIT_S = 10.0


def test_what_was_cancelled_while_it_was_made_is_undone_after_the_loop() -> None:
    started, go_on = threading.Event(), threading.Event()
    undone: queue.Queue[str] = queue.Queue()

    def create() -> str:
        started.set()
        go_on.wait(WAIT_S)
        return "box"

    async def main() -> None:
        task = asyncio.ensure_future(make(create, undone.put))
        await asyncio.get_running_loop().run_in_executor(None, started.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert undone.empty()
    go_on.set()
    assert undone.get(timeout=WAIT_S) == "box"
    assert undone.empty()


def test_what_was_cancelled_just_after_it_was_made_is_undone() -> None:
    undone: queue.Queue[str] = queue.Queue()

    async def main() -> None:
        task = asyncio.ensure_future(make(lambda: "box", undone.put))
        # The loop doesn't turn until the thread is done, so the cancellation comes before the answer.
        await asyncio.sleep(0)
        done = threading.Event()
        offloaded = asyncio.ensure_future(offload(done.set))
        await asyncio.sleep(0)
        done.wait(WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await offloaded

    asyncio.run(main())
    assert undone.get(timeout=WAIT_S) == "box"


def test_what_arrives_is_kept() -> None:
    undone: list[str] = []
    assert asyncio.run(make(lambda: "box", undone.append)) == "box"
    assert undone == []


def test_many_calls_wait_at_once() -> None:
    together = threading.Barrier(MOST, timeout=WAIT_S)

    async def main() -> None:
        await asyncio.gather(*(offload(together.wait) for _ in range(MOST)))

    asyncio.run(main())
