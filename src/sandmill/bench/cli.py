"""`sandmill bench`: the table."""

import json
import platform
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from sandmill.bench.latency import QUICK, Plan, Report, measure
from sandmill.bench.samples import Figure, Samples

if TYPE_CHECKING:
    from sandmill.bench.images import ImagePlan


@click.group("bench", invoke_without_command=True)
@click.pass_context
@click.option("--json", "as_json", is_flag=True, help="Print every figure with its peer as JSON.")
@click.option("--quick", is_flag=True, help="Fewer rounds: a look, not a measurement.")
def bench_command(context: click.Context, as_json: bool, quick: bool) -> None:
    """Measure this machine: create, exec, session and start-up beside raw system calls, bwrap, runc and a host spawn.

    \b
    Examples:
      sandmill bench
      sandmill bench --json > figures.json
    """
    if context.invoked_subcommand is not None:
        return
    plan = QUICK if quick else Plan()
    report = measure(plan, lambda line: print(line, file=sys.stderr))
    print(json.dumps(as_document(report, plan), indent=2) if as_json else as_text(report))


@bench_command.command("images")
@click.option("--json", "as_json", is_flag=True, help="Print every figure with its peer as JSON.")
@click.option(
    "--layer-mb", type=click.IntRange(1), default=1024, show_default=True, help="Of the layer that is unpacked."
)
@click.option(
    "--pulled-mb", type=click.IntRange(1), default=1024, show_default=True, help="Of the image that is pulled."
)
@click.option("--askers", type=click.IntRange(1), default=200, show_default=True, help="How many pull it at once.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
def images_command(as_json: bool, layer_mb: int, pulled_mb: int, askers: int, rounds: int) -> None:
    """Measure images: a layer's way into the store beside tar and zstd, one pull for many beside one for one.

    \b
    Example:
      sandmill bench images --layer-mb 256
    """
    from sandmill.bench.images import ImagePlan, measure_images

    plan = ImagePlan(layer_mb=layer_mb, pulled_mb=pulled_mb, askers=askers, rounds=rounds)
    report = measure_images(plan, lambda line: print(line, file=sys.stderr))
    print(json.dumps(as_document(report, plan), indent=2) if as_json else as_text(report))


def as_document(report: Report, plan: "Plan | ImagePlan") -> dict[str, object]:
    return {
        "machine": {"kernel": platform.release(), "python": platform.python_version()},
        "plan": asdict(plan),
        "rows": [
            {"name": row.name, "p50_ms": row.p50, "p99_ms": row.p99, "samples": len(row.values)}
            if row.values
            else {"name": row.name, "absent": row.absent}
            for row in report.rows
        ],
        "figures": [figure.as_json() for figure in report.figures],
    }


def as_text(report: Report) -> str:
    lines = [f"{'':36}{'p50 ms':>9}{'p99 ms':>9}{'samples':>9}"]
    lines += [_row(row) for row in report.rows]
    lines += ["", f"{'to reach':48}{'measured':>12}{'limit':>14}   peer"]
    lines += [_figure(figure) for figure in report.figures]
    return "\n".join(lines)


def _row(row: Samples) -> str:
    if not row.values:
        return f"{row.name:36}{'-':>9}{'-':>9}   {row.absent or 'not measured'}"
    return f"{row.name:36}{row.p50:9.2f}{row.p99:9.2f}{len(row.values):9}"


def _figure(figure: Figure) -> str:
    mark = "yes" if figure.reached else "NO"
    sign = ">=" if figure.higher else "<="
    if figure.relative:
        measured = f"{figure.ratio:.2f}x" if figure.ratio is not None else "-"
        limit = f"{sign} {figure.limit:g}x"
    else:
        measured, limit = f"{figure.value:.2f} {figure.unit}", f"{sign} {figure.limit:g} {figure.unit}"
    peer = f"{figure.peer} {figure.peer_value:.2f}" if figure.peer and figure.peer_value is not None else ""
    return f"{figure.name:48}{measured:>12}{limit:>12} {mark:>3} {peer}"
