"""pass@k, and the table."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sandmill.rollouts import Failure, Record, Times, pass_at_k, summarize
from sandmill.rollouts.summary import table_of

COUNTS = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


@given(COUNTS)
def test_it_is_the_share_of_samples_with_a_success(counts: tuple[int, int, int]) -> None:
    n, solved, k = counts
    samples = list(combinations([True] * solved + [False] * (n - solved), k))
    assert pass_at_k(n, solved, k) == pytest.approx(sum(map(any, samples)) / len(samples))


@given(COUNTS)
def test_more_attempts_never_hurt(counts: tuple[int, int, int]) -> None:
    n, solved, k = counts
    assert pass_at_k(n, solved, 1) == pytest.approx(solved / n)
    if k > 1:
        assert pass_at_k(n, solved, k) >= pass_at_k(n, solved, k - 1)


@pytest.mark.parametrize(("n", "solved", "k"), [(0, 0, 1), (3, 4, 1), (3, 1, 4), (3, -1, 1), (3, 1, 0)])
def test_what_cannot_be(n: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, solved, k)


def record(task: str, attempt: int, reward: float | None) -> Record:
    failure = Failure(type="infrastructure", code="node_exhausted", message="full", retryable=True)
    return Record(
        task=task,
        task_hash="h",
        agent="oracle",
        grading="fresh",
        attempt=attempt,
        reward=reward,
        error=failure if reward is None else None,
        times=Times(run_s=2.0),
        started_at=0.0,
        ended_at=1.0,
    )


def test_errors_are_counted_and_never_averaged() -> None:
    summary = summarize([record("a", 0, 1.0), record("a", 1, None), record("b", 0, 0.0), record("b", 1, 1.0)], 2)
    a, b = summary.rows
    assert (a.n, a.graded, a.reward_mean, a.pass_at_1, a.pass_at_k) == (2, 1, 1.0, 1.0, None)
    assert a.errors == {"infrastructure/node_exhausted": 1}
    assert (b.reward_mean, b.pass_at_1, b.pass_at_k) == (0.5, 0.5, 1.0)
    (total,) = summary.totals
    assert (total.n, total.graded, total.pass_at_1) == (4, 3, 0.75)
    assert total.reward_mean == pytest.approx(2 / 3)


def test_the_table_fits_eighty_columns() -> None:
    console = Console(width=80, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table_of(summarize([record("a-task-with-a-long-name", n, 1.0) for n in range(4)], 4)))
    text = console.export_text()
    console.file.close()
    assert "pass@4" in text
    assert "1.000" in text
    assert "…" not in text
