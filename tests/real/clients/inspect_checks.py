"""Inspect's own self-check, and what it leaves open; test_inspect.py runs this file with Inspect's interpreter.

SANDMILL_CHECK_USER is the default user of the sandbox that the self-check gets; empty: root.
"""

import os
from collections.abc import AsyncIterator

import pytest
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from sandmill.clients.inspect import SandmillConfig, SandmillSandboxEnvironment

USER = os.environ.get("SANDMILL_CHECK_USER") or None

RIGHTS = "root may read and write every file, whatever its mode says"
CANNOT: dict[str, str] = (
    {}
    if USER
    else {
        "test_read_file_not_allowed": RIGHTS,
        "test_write_text_file_without_permissions": RIGHTS,
        "test_write_binary_file_without_permissions": RIGHTS,
    }
)
"""Self-checks that can't hold, and why."""


@pytest.fixture
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncIterator[SandmillSandboxEnvironment]:
    if (why := CANNOT.get(request.node.originalname)) is not None:
        request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    made = await SandmillSandboxEnvironment.sample_init("checks", SandmillConfig(user=USER), {})
    yield made["default"]
    await SandmillSandboxEnvironment.sample_cleanup("checks", None, made, False)
