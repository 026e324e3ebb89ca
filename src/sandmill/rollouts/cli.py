"""`sandmill eval`: its command line."""

import asyncio
import fnmatch
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from rich.console import Console

from sandmill.errors import SandmillError, UsageError
from sandmill.rollouts.agents import Agent, agent_of
from sandmill.rollouts.evaluation import Evaluation, Limits
from sandmill.rollouts.progress import Progress
from sandmill.rollouts.records import Record, RecordLog
from sandmill.rollouts.summary import Summary, summarize, table_of
from sandmill.tasks import Task, find_tasks

INTERRUPTED = 130
UNGRADED = 3
"""Exit code when attempts have no reward."""

EXAMPLES = """
\b
Examples:
  sandmill eval examples/tasks --agent oracle --agent nop -k 4 --out out/demo
  sandmill eval tasks/fix-parser --agent 'command:python3 /opt/agent.py' -k 8 --concurrency 8
  sandmill eval tasks --filter 'git-*' --agent oracle --json
"""


@click.command("eval", epilog=EXAMPLES)
@click.argument("tasks", type=click.Path(path_type=Path))
@click.option(
    "--agent",
    "agents",
    multiple=True,
    required=True,
    metavar="oracle|nop|command:LINE",
    help="Who attempts the tasks: their own solution, nobody, or a shell line in the sandbox "
    "(instruction in the file $SANDMILL_INSTRUCTION_FILE). May be given several times.",
)
@click.option(
    "-k", "k", type=click.IntRange(1, 100_000), default=1, show_default=True, help="Attempts a task and agent."
)
@click.option("--concurrency", type=click.IntRange(1, 10_000), help="Attempts at once.  [default: number of CPUs]")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("out/eval"),
    show_default=True,
    help="Records and logs go here; the same folder again resumes.",
)
@click.option(
    "--grade-in-place", is_flag=True, help="Grade in the attempt's own sandbox, its processes ended, as Harbor does."
)
@click.option(
    "--filter", "filters", multiple=True, metavar="GLOB", help="Only tasks whose name matches (any of) these."
)
@click.option("--fresh", is_flag=True, help="Don't resume: earlier records in --out are set aside.")
@click.option(
    "--retries",
    type=click.IntRange(0, 20),
    default=2,
    show_default=True,
    help="New tries after an infrastructure failure.",
)
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON on stdout; nothing else there.")
def eval_command(
    tasks: Path,
    agents: tuple[str, ...],
    k: int,
    concurrency: int | None,
    out: Path,
    grade_in_place: bool,
    filters: tuple[str, ...],
    fresh: bool,
    retries: int,
    as_json: bool,
) -> None:
    """Lets agents attempt TASKS (a task folder, or a folder of them) in sandboxes, and grades what they did.

    Every attempt gets a sandbox of its own and is graded in a fresh one that has the files it changed. A record of each is
    in OUT/records.jsonl. Exit code: 0, 3 when attempts have no reward because of errors, 130 after Ctrl-C.
    """
    try:
        chosen = choose(find_tasks(tasks), filters)
        named = {agent.name: agent for agent in map(agent_of, agents)}
        at_once = concurrency or os.cpu_count() or 1
        limits = Limits(in_flight=at_once, grading=at_once, preparing=min(2, at_once), tries=retries + 1)
        code = asyncio.run(_main(chosen, list(named.values()), k, out, grade_in_place, fresh, limits, as_json))
    except SandmillError as error:
        click.echo(f"sandmill eval: {error}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    sys.exit(code)


def choose(tasks: Sequence[Task], filters: Sequence[str]) -> list[Task]:
    """Tasks whose name matches any of the patterns; all without one. Raises UsageError if none is left."""
    chosen = [task for task in tasks if not filters or any(fnmatch.fnmatchcase(task.name, one) for one in filters)]
    if not chosen:
        names = ", ".join(task.name for task in tasks)
        raise UsageError(f"no task matches {' or '.join(filters)}", hint=f"there are {names}")
    return chosen


async def _main(
    tasks: list[Task],
    agents: list[Agent],
    k: int,
    out: Path,
    in_place: bool,
    fresh: bool,
    limits: Limits,
    as_json: bool,
) -> int:
    from sandmill.rollouts.sdk_workshop import SdkWorkshop

    # Control calls are made in threads, and a preparation holds one for as long as it takes.
    threads = min(256, 8 + 2 * limits.in_flight)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads, thread_name_prefix="eval"))
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width; cut figures help nobody
    progress = Progress(console)
    with RecordLog(out, fresh=fresh) as log:
        evaluation = Evaluation(
            tasks, agents, k, SdkWorkshop(), log, out, in_place=in_place, limits=limits, watcher=progress
        )
        if evaluation.resumed:
            console.print(f"resuming: {evaluation.resumed} attempts in {log.path} are finished", soft_wrap=True)
        with progress.follow(evaluation):
            interrupted = await _until_interrupted(evaluation, console)
    summary = summarize(evaluation.records, k)
    _show(summary, evaluation.records, console, log.path, as_json)
    if interrupted:
        line = shlex.join([word for word in sys.argv[1:] if word != "--fresh"])
        console.print(f"stopped; nothing is left running. To go on: sandmill {line}", soft_wrap=True, highlight=False)
        return INTERRUPTED
    return UNGRADED if any(record.error is not None for record in evaluation.records) else 0


async def _until_interrupted(evaluation: Evaluation, console: Console) -> bool:
    """Runs it. The first Ctrl-C (or SIGTERM) stops it and waits for the clean-up; a second leaves that to the leases."""
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(evaluation.run())
    asked = False

    def stop() -> None:
        nonlocal asked
        if asked:
            os._exit(INTERRUPTED)
        asked = True
        console.print("stopping: ending the sandboxes (again to leave them to their leases)", soft_wrap=True)
        work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await work
    except asyncio.CancelledError:
        if not asked:
            raise
        return True
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return False


def _show(summary: Summary, records: Sequence[Record], console: Console, path: Path, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(summary.as_json() | {"records": str(path)}))
        return
    console.print()
    console.print(table_of(summary))
    console.print(f"\n{len(records)} records: {path}", soft_wrap=True, highlight=False)
