"""How an evaluation goes on: a live view at a terminal, a plain line an attempt elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sandmill.rollouts.evaluation import Evaluation
from sandmill.rollouts.records import Record
from sandmill.rollouts.schedule import Counts


class Progress:
    """A `Watcher` that prints to `console`."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._done = 0

    def finished(self, record: Record) -> None:
        self._done += 1
        if not self._quiet:
            self._console.print(line_of(record), soft_wrap=True, highlight=False)

    def note(self, text: str) -> None:
        if not self._quiet:
            self._console.print(Text(f"  {text}", style="yellow"), soft_wrap=True, highlight=False)

    @contextmanager
    def follow(self, evaluation: Evaluation) -> Iterator[None]:
        """Shows the counts below the lines, at a terminal."""
        if self._quiet or not self._console.is_terminal:
            yield
            return
        begun = monotonic()
        with Live(
            get_renderable=lambda: counts_of(evaluation.statistics(), monotonic() - begun),
            console=self._console,
            refresh_per_second=4,
            transient=True,
        ):
            yield


def line_of(record: Record) -> Text:
    """One line for one attempt."""
    times = record.times
    line = Text(f"{record.task} {record.agent} #{record.attempt}  ")
    if record.error is not None:
        line.append(f"{record.error.type}/{record.error.code}: {record.error.message.splitlines()[0]}", style="red")
    else:
        assert record.reward is not None
        line.append(f"reward {record.reward:g}", style="green" if record.reward >= 1 else "default")
    if record.agent_timed_out:
        line.append("  agent timed out", style="yellow")
    if record.tries > 1:
        line.append(f"  {record.tries} tries", style="yellow")
    line.append(
        f"  queue {times.queue_s:.2f}s prepare {times.prepare_s:.2f}s run {times.run_s:.2f}s grade {times.grade_s:.2f}s",
        style="dim",
    )
    return line


def counts_of(counts: Counts, elapsed_s: float) -> Text:
    """The line that moves."""
    return Text(
        f"{counts.done}/{counts.total} done  {counts.running} running  {counts.grading} grading  "
        f"{counts.preparing} preparing  {counts.waiting} waiting  {elapsed_s:.0f} s"
    )
