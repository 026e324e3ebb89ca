"""Follows the backend's events, so that a sandbox's end is known here moments after it happened."""

import asyncio
import logging

from sandmill.control.sandboxes import Sandboxes
from sandmill.errors import SandmillError

WAIT_S = 30.0
PAUSE_S = 0.2
GATHER_S = 0.05

log = logging.getLogger("sandmill.events")


async def follow(sandboxes: Sandboxes) -> None:
    """Runs until it is cancelled. After an interruption (the node was away) whole lists are compared."""
    backend = sandboxes.backend
    after = 0
    compare = False
    while True:
        try:
            if after == 0:
                after = (await backend.events(0, 0.0)).next
            if compare:
                await sandboxes.reconcile()
                compare = False
            news = await backend.events(after, WAIT_S)
            for end in news.ended:
                sandboxes.note_end(end)
            if news.next < after:  # another backend than before
                compare = True
            after = news.next
            if news.ended:
                await asyncio.sleep(GATHER_S)  # ends come in crowds: one answer for many
        except SandmillError as error:
            log.warning("events: %s", error)
            compare, after = True, 0
            await asyncio.sleep(PAUSE_S)
