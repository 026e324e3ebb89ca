"""One thread a process renews the leases of every sandbox that the process holds open.

Use renews a lease by itself; this keeps a sandbox while its owner thinks for longer than the lease. A process that is
killed stops renewing, and its sandboxes end with their leases. So do those whose last object was dropped.
"""

import threading
import time
from collections.abc import Callable

from sandmill.errors import SandmillError


class Heartbeat:
    """Renews with `renew(ttl by id)`, which gives the ids that are gone."""

    def __init__(self, renew: Callable[[dict[str, float]], list[str]]) -> None:
        self._renew = renew
        self._leases: dict[str, float] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def hold(self, sandbox_id: str, lease_s: float) -> None:
        with self._changed:
            self._leases[sandbox_id] = lease_s
            if self._thread is None or not self._thread.is_alive():  # also after a fork
                self._thread = threading.Thread(target=self._run, name="sandmill-leases", daemon=True)
                self._thread.start()
            self._changed.notify()

    def renewed(self, sandbox_id: str, lease_s: float) -> None:
        """Its lease was set to another length, which is kept from now on."""
        with self._changed:
            if sandbox_id in self._leases:
                self._leases[sandbox_id] = lease_s
                self._changed.notify()

    def release(self, sandbox_id: str) -> None:
        with self._changed:
            self._leases.pop(sandbox_id, None)

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            with self._changed:
                if not self._leases:
                    self._thread = None
                    return
                due = last + min(self._leases.values()) / 3
                if (left := due - time.monotonic()) > 0:
                    self._changed.wait(left)
                    continue
                leases = dict(self._leases)
            last = time.monotonic()
            try:
                gone = self._renew(leases)
            except SandmillError:
                continue  # the server is away: it is tried again, well before the leases end
            with self._changed:
                for sandbox_id in gone:
                    self._leases.pop(sandbox_id, None)
