"""What the records say: rewards, pass@k, where the time went, errors by type."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.table import Table

from sandmill.rollouts.records import Record, Times

SOLVED = 1.0
"""An attempt solved its task when its reward is at least this."""


def pass_at_k(n: int, solved: int, k: int) -> float:
    """The chance that at least one of `k` attempts solves a task, from `solved` of `n`: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al., 2021 (arXiv:2107.03374). Raises ValueError unless 0 <= solved <= n and 1 <= k <= n.
    """
    if not (0 <= solved <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {solved} solved in {n} attempts")
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One agent on one task, or on all (`task` null). Attempts with an error count in `errors` alone.

    `pass_at_k`: null where fewer than k attempts have a reward. Over all tasks it is the mean of theirs. `times`: means.
    """

    task: str | None
    agent: str
    n: int
    graded: int
    reward_mean: float | None
    pass_at_1: float | None
    pass_at_k: float | None
    times: Times
    errors: dict[str, int]
    timed_out: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Rows by task, and one for all tasks of each agent."""

    k: int
    rows: list[Row]
    totals: list[Row]

    def as_json(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


def summarize(records: Sequence[Record], k: int) -> Summary:
    """Sums up the records of one evaluation."""
    agents = list(dict.fromkeys(record.agent for record in records))
    rows: list[Row] = []
    totals: list[Row] = []
    for agent in agents:
        mine = [record for record in records if record.agent == agent]
        of_agent = [
            _row(task, agent, [record for record in mine if record.task == task], k)
            for task in sorted({record.task for record in mine})
        ]
        rows += of_agent
        whole = _row(None, agent, mine, k)
        totals.append(
            msgspec.structs.replace(
                whole,
                pass_at_1=_mean(row.pass_at_1 for row in of_agent),
                pass_at_k=_mean(row.pass_at_k for row in of_agent),
            )
        )
    return Summary(k=k, rows=rows, totals=totals)


def _row(task: str | None, agent: str, records: Sequence[Record], k: int) -> Row:
    rewards = [record.reward for record in records if record.reward is not None]
    solved = sum(reward >= SOLVED for reward in rewards)
    graded = len(rewards)
    return Row(
        task=task,
        agent=agent,
        n=len(records),
        graded=graded,
        reward_mean=_mean(rewards),
        pass_at_1=pass_at_k(graded, solved, 1) if graded else None,
        pass_at_k=pass_at_k(graded, solved, k) if graded >= k else None,
        times=Times(
            **{
                name: _mean(getattr(record.times, name) for record in records) or 0.0
                for name in ("queue_s", "prepare_s", "run_s", "grade_s", "clean_s")
            }
        ),
        errors=dict(Counter(f"{e.type}/{e.code}" for record in records if (e := record.error) is not None)),
        timed_out=sum(record.agent_timed_out for record in records),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def table_of(summary: Summary) -> Table:
    """The table for people; times are means in seconds."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("task", no_wrap=True)
    table.add_column("agent", no_wrap=True)
    for name in (
        "n",
        "reward",
        "pass@1",
        *([f"pass@{summary.k}"] if summary.k > 1 else []),
        "queue",
        "prepare",
        "run",
        "grade",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    # A column that would be empty takes its place from the figures.
    trouble = any(row.errors or row.timed_out for row in summary.rows)
    if trouble:
        table.add_column("errors", overflow="fold")
    width = len(table.columns)
    for row in summary.rows:
        table.add_row(*_cells(row, summary.k)[:width])
    if summary.rows:
        table.add_section()
    for row in summary.totals:
        table.add_row(*_cells(row, summary.k)[:width], style="bold")
    return table


def _cells(row: Row, k: int) -> list[str]:
    times = row.times
    said = [f"{kind} x{count}" for kind, count in sorted(row.errors.items())]
    if row.timed_out:
        said.append(f"agent timed out x{row.timed_out}")
    return [
        row.task or "all",
        row.agent,
        str(row.n),
        _figure(row.reward_mean, 3),
        _figure(row.pass_at_1, 3),
        *([_figure(row.pass_at_k, 3)] if k > 1 else []),
        *(_figure(value, 2) for value in (times.queue_s, times.prepare_s, times.run_s, times.grade_s)),
        ", ".join(said) or "-",
    ]


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
