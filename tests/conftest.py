"""The house rules of the test run: real tests need root, and a skip must be on the list."""

import os
import tomllib
from pathlib import Path

import pytest

SKIP_LIST = Path(__file__).parent / "skips.toml"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "real" in Path(item.fspath).parts:
            item.add_marker(pytest.mark.real)


class SkipGuard:
    """Fails a CI run that skips a test which `skips.toml` does not name (with why, and what would un-skip it)."""

    def __init__(self) -> None:
        self.allowed: dict[str, str] = tomllib.loads(SKIP_LIST.read_text())["allowed"]
        self.unlisted: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._see(report.nodeid, str(report.longrepr))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._see(report.nodeid, str(report.longrepr))

    def _see(self, nodeid: str, why: str) -> None:
        if not any(nodeid.startswith(prefix) for prefix in self.allowed):
            self.unlisted.append(f"{nodeid}: {why}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.unlisted:
            terminalreporter.write_line(f"skip that is not in tests/skips.toml: {line}", red=True)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unlisted and os.environ.get("CI") == "true" and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SkipGuard(), "skip-guard")
