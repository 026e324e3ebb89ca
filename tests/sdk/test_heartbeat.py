"""Who keeps a sandbox's lease, and until when."""

import gc
import queue

from sandmill.sdk import sandbox
from sandmill.sdk.configuration import Server
from sandmill.sdk.control import Control
from sandmill.sdk.heartbeat import Heartbeat

LONG_S = 3600.0
WAIT_S = 10.0


def test_a_held_lease_is_renewed_until_it_is_released() -> None:
    renewals: queue.Queue[dict[str, float]] = queue.Queue()

    def renew(leases: dict[str, float]) -> list[str]:
        renewals.put(leases)
        return []

    heart = Heartbeat(renew)
    heart.hold("a", 0.03)
    assert renewals.get(timeout=WAIT_S) == {"a": 0.03}
    assert renewals.get(timeout=WAIT_S) == {"a": 0.03}
    heart.hold("b", LONG_S)
    heart.release("a")
    assert heart._leases == {"b": LONG_S}


def test_another_length_is_kept_from_then_on() -> None:
    renewals: queue.Queue[dict[str, float]] = queue.Queue()

    def renew(leases: dict[str, float]) -> list[str]:
        renewals.put(leases)
        return list(leases)

    heart = Heartbeat(renew)
    heart.hold("a", LONG_S)
    heart.renewed("a", 0.03)
    heart.renewed("unknown", 0.03)
    assert renewals.get(timeout=WAIT_S) == {"a": 0.03}
    heart.renewed("a", 0.03)
    assert "unknown" not in heart._leases


def test_a_dropped_sandbox_is_not_held_any_longer() -> None:
    class Channel:
        pass

    control = Control(Server("http://127.0.0.1:1", "key"))
    channel = Channel()
    sandbox.hold(control, channel, "a", LONG_S)
    heart = sandbox.heartbeat_of(control)
    assert heart._leases == {"a": LONG_S}
    del channel
    gc.collect()
    assert heart._leases == {}
