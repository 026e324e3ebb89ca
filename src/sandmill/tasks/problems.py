"""What is wrong with task files: every problem at once, each with its file and key."""

import math
from pathlib import Path
from typing import Any

from sandmill.errors import UsageError


class TaskError(UsageError):
    """Task files that can't be used. `details["problems"]` lists all of them, each as `file: key: what is wrong`."""

    default_code = "task_invalid"


class Problems:
    """Collects the problems of one or more tasks."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, file: Path, key: str | None, what: str) -> None:
        self.found.append(f"{file}: {key}: {what}" if key else f"{file}: {what}")

    def raise_any(self) -> None:
        """Raises TaskError if there are any."""
        if self.found:
            one = len(self.found) == 1
            text = self.found[0] if one else "\n  ".join([f"{len(self.found)} problems in task files:", *self.found])
            raise TaskError(text, details={"problems": list(self.found)})


class Table:
    """One table of a TOML file, read key by key; `finish` reports the keys that nobody asked for."""

    def __init__(self, file: Path, name: str, data: Any, problems: Problems) -> None:
        self.file = file
        self.name = name
        self._problems = problems
        if not isinstance(data, dict):
            problems.add(file, name, "must be a table")
            data = {}
        self._data: dict[str, Any] = data
        self._asked: set[str] = set()

    def key(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def problem(self, key: str, what: str) -> None:
        self._problems.add(self.file, self.key(key), what)

    def has(self, key: str) -> bool:
        return key in self._data

    def raw(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return self._data.get(key, default)

    def table(self, key: str) -> "Table":
        """A table within; an absent one reads as empty."""
        return Table(self.file, self.key(key), self.raw(key, {}), self._problems)

    def text(self, key: str) -> str | None:
        value = self.raw(key)
        if value is None or isinstance(value, str):
            return value
        self.problem(key, f"must be text, not {value!r}")
        return None

    def positive(self, key: str) -> float | None:
        """A number above 0."""
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            self.problem(key, f"must be a number above 0, not {value!r}")
            return None
        return float(value)

    def count(self, key: str) -> int | None:
        """A whole number above 0."""
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.problem(key, f"must be a whole number above 0, not {value!r}")
            return None
        return value

    def texts(self, key: str) -> dict[str, str]:
        """A table of texts, such as an environment."""
        value = self.raw(key, {})
        if not isinstance(value, dict):
            self.problem(key, "must be a table")
            return {}
        for name, text in value.items():
            if not isinstance(text, str):
                self.problem(f"{key}.{name}", f"must be text, not {text!r}")
        return {name: text for name, text in value.items() if isinstance(text, str)}

    def refuse(self, key: str, why: str) -> None:
        """A key of the format that Sandmill can't honour: an error, not silence, when it is set to anything."""
        if self.raw(key):
            self.problem(key, why)

    def ignore(self, *keys: str) -> None:
        """Keys that say nothing to an evaluation."""
        self._asked.update(keys)

    def finish(self) -> None:
        for key in sorted(set(self._data) - self._asked):
            self.problem(key, "no such key")
