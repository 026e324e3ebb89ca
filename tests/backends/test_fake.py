"""The fake passes the conformance suite; what it does not claim is skipped by claim, not by mood."""

import pytest

from sandmill.backends import conformance
from sandmill.backends.base import Backend, SandboxIO
from sandmill.backends.fake import FakeBackend
from sandmill.errors import NodeError, SandboxGoneError
from sandmill.wire import Exec, Result


class FakeSubject:
    capabilities: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.backend: FakeBackend = FakeBackend()

    async def io(self, sandbox_id: str, token: str) -> SandboxIO:
        return self.backend.io(sandbox_id)

    async def pass_time(self, seconds: float) -> None:
        self.backend.advance(seconds)


NOT_CLAIMED = {
    "a_pipe_held_by_a_child_ends_nothing_late",
    "a_timeout_ends_the_whole_tree",
    "a_write_is_never_half",
    "an_out_of_memory_kill_is_said",
    "big_output_does_not_block",
    "long_arguments_work_or_say_so",
    "the_user_is_who_was_asked",
}


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: conformance.Check) -> None:
    try:
        await conformance.run(check, FakeSubject())
    except conformance.NotClaimed:
        assert check.__name__ in NOT_CLAIMED
    else:
        assert check.__name__ not in NOT_CLAIMED


def test_it_is_a_backend() -> None:
    assert isinstance(FakeBackend(), Backend)


async def test_scripted_commands_and_failures() -> None:
    backend = FakeBackend()
    spec = conformance.new_spec()
    backend.fail_next("create", NodeError("full", code="node_exhausted", retryable=True))
    with pytest.raises(NodeError, match="full"):
        await backend.create(spec)
    await backend.create(spec)
    backend.on(r"^pytest", lambda command: Result(pid=1, exit_code=1, stdout=b"1 failed"))
    assert (await backend.io(spec.id).run(Exec(shell="pytest -q"))).stdout == b"1 failed"
    backend.end(spec.id, "oom", "out of memory")
    with pytest.raises(SandboxGoneError) as caught:
        await backend.io(spec.id).run(Exec(shell="true"))
    assert caught.value.cause == "oom"
