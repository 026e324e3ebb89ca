"""Create, exec, session and start-up latency, beside their peers, in interleaved rounds.

Rounds are interleaved so that a busy minute of the machine falls on everyone: each round takes a few samples of each
thing, and percentiles are over all rounds.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sandmill.bench import peers
from sandmill.bench.samples import Figure, Samples
from sandmill.sdk import Sandbox

READY_S = 30.0


@dataclass(frozen=True)
class Plan:
    """How much to measure. Counts are a round, but for `throughput` (in all) and `starts` (of each command)."""

    rounds: int = 10
    spawns: int = 40
    creates: int = 10
    sessions: int = 100
    peer_creates: int = 3
    throughput: int = 600
    in_flight: int = 16
    starts: int = 7


QUICK = Plan(rounds=3, spawns=20, creates=5, sessions=50, peer_creates=2, throughput=100, starts=3)


@dataclass
class Report:
    rows: list[Samples]
    figures: list[Figure]


@contextmanager
def running_server() -> Iterator[dict[str, str]]:
    """A server of this installation on free ports, in a state directory of its own; yields the environment for clients.

    It is stopped with SIGTERM at the end. Raises RuntimeError with its output if it isn't ready within 30 s.
    """
    with tempfile.TemporaryDirectory(prefix="sandmill-bench-") as state:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SANDMILL_API")}
        command = [
            sys.executable,
            "-m",
            "sandmill.cli",
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--data-listen",
            "127.0.0.1:0",
        ]
        server = subprocess.Popen(
            [*command, "--state-dir", state],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            found = re.search(r"ready api=(\S+)", line)
            if not found:
                raise RuntimeError(f"the server did not come up; it said: {line!r}")
            key = (Path(state) / "api-key").read_text().strip()
            yield environment | {"SANDMILL_API_URL": found[1], "SANDMILL_API_KEY": key}
        finally:
            server.terminate()
            server.wait(READY_S)


@contextmanager
def environment_of(variables: dict[str, str]) -> Iterator[None]:
    """Sets SANDMILL_API_* of this process for the time of the block."""
    before = {name: os.environ.get(name) for name in ("SANDMILL_API_URL", "SANDMILL_API_KEY")}
    os.environ.update({name: variables[name] for name in before})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def measure(plan: Plan, say: Callable[[str], None]) -> Report:
    """Runs everything; `say` hears what is being measured."""
    with running_server() as variables, environment_of(variables), peers.runc_bundle() as bundle:
        return _Run(plan, variables, bundle, say).run()


class _Run:
    def __init__(self, plan: Plan, variables: dict[str, str], bundle: Path | None, say: Callable[[str], None]) -> None:
        self.plan, self.variables, self.bundle, self.say = plan, variables, bundle, say
        self.raw = Samples("raw clone+overlay+pivot")
        self.raw_net = Samples("raw clone+overlay+pivot+netns")
        self.bwrap = Samples("bwrap true")
        self.runc = Samples("runc run true")
        self.spawn = Samples("host spawn of true (Python)")
        self.create = Samples("create to first exec's result (SDK)")
        self.exec = Samples("exec of true (SDK)")
        self.session = Samples("session command (SDK)")
        self.runs = 0

    def run(self) -> Report:
        plan = self.plan
        self._warm_up()
        program = peers.raw_program()
        bwrap = peers.bwrap_command()
        if program is None:
            self.raw.absent = self.raw_net.absent = "needs a source checkout with cargo"
        if bwrap is None:
            self.bwrap.absent = "bwrap is not installed (apt-get install bubblewrap)"
        if self.bundle is None:
            self.runc.absent = "runc or busybox-static is not installed"
        with Sandbox() as box, box.session() as session:
            for number in range(plan.rounds):
                self.say(f"round {number + 1} of {plan.rounds}")
                self.spawn.time(peers.host_spawn, plan.spawns)
                self.exec.time(lambda: box.run(["/bin/true"]), plan.spawns)
                if program is not None:
                    peers.raw_create(program, self.raw, plan.creates, net=False)
                    peers.raw_create(program, self.raw_net, plan.creates, net=True)
                self._creates()
                self.session.time(lambda: session.run(":"), plan.sessions)
                if bwrap is not None:
                    self.bwrap.time(
                        lambda: subprocess.run(bwrap, check=True, stdin=subprocess.DEVNULL), plan.peer_creates
                    )
                if self.bundle is not None:
                    self.runc.time(self._runc, plan.peer_creates)
        floor = peers.raw_rate(program, plan.throughput // 3) if program is not None else None
        rate = self._throughput()
        bare, imported = self._start(["-c", "pass"]), self._start(["-c", "import sandmill"])
        command = self._start(["-m", "sandmill.cli", "run", "true"])
        embedded = self._embedded()
        rows = [self.raw, self.raw_net, self.bwrap, self.runc, self.spawn, self.create, self.exec, self.session]
        figures = [
            Figure("create to first result, p50", self.create.p50, "ms", 5),
            Figure("create to first result, p99", self.create.p99, "ms", 15),
            self._beside("create to first result, p50", self.create.p50, 5, self.raw, self.raw.p50),
            self._beside("create to first result, p50", self.create.p50, 5, self.raw_net, self.raw_net.p50),
            self._beside("exec of true, p50", self.exec.p50, 1.5, self.spawn, self.spawn.p50),
            self._beside("exec of true, p99", self.exec.p99, 3, self.spawn, self.spawn.p99),
            Figure("session command, p50", self.session.p50, "ms", 0.5),
            Figure(
                f"create+exec+kill at {plan.in_flight} in flight",
                rate,
                "/s",
                300,
                higher=True,
                peer="raw create+kill+netns, one a core",
                peer_value=floor,
            ),
            Figure("import sandmill", imported.p50 - bare.p50, "ms", 50, peer="python -c pass", peer_value=bare.p50),
            Figure("first `with Sandbox()`, embedded server", embedded.p50, "ms", 400),
            Figure("`sandmill run true`, running server", command.p50, "ms", 200),
        ]
        return Report(rows, figures)

    def _beside(self, name: str, value: float, limit: float, peer: Samples, peer_value: float) -> Figure:
        return Figure(name, value, "ms", limit, relative=True, peer=peer.name, peer_value=peer_value)

    def _warm_up(self) -> None:
        for _ in range(5):
            with Sandbox() as box:
                box.run(["/bin/true"])

    def _creates(self) -> None:
        for _ in range(self.plan.creates):
            start = time.perf_counter()
            box = Sandbox()
            try:
                box.run(["/bin/true"])
                self.create.values.append((time.perf_counter() - start) * 1000)
            finally:
                box.kill()

    def _runc(self) -> None:
        assert self.bundle is not None
        self.runs += 1
        peers.runc_run(self.bundle, f"sandmill-bench-{os.getpid()}-{self.runs}")

    def _throughput(self) -> float:
        """Create+exec+kill cycles a second, from threads of one process."""
        self.say(f"{self.plan.throughput} cycles, {self.plan.in_flight} in flight")

        def cycle(_: int) -> None:
            with Sandbox() as box:
                box.run(["/bin/true"])

        with ThreadPoolExecutor(self.plan.in_flight) as pool:
            list(pool.map(cycle, range(self.plan.in_flight)))
            start = time.perf_counter()
            list(pool.map(cycle, range(self.plan.throughput)))
            return self.plan.throughput / (time.perf_counter() - start)

    def _start(self, arguments: list[str]) -> Samples:
        self.say(f"python {' '.join(arguments)}")
        samples = Samples(" ".join(arguments))
        command = [sys.executable, *arguments]
        samples.time(
            lambda: subprocess.run(command, check=True, env=self.variables, capture_output=True), self.plan.starts
        )
        return samples

    def _embedded(self) -> Samples:
        self.say("first `with Sandbox()` of a process, with its embedded server")
        code = (
            "import time; from sandmill import Sandbox; start = time.perf_counter()\n"
            "with Sandbox() as box: print((time.perf_counter() - start) * 1000)"
        )
        environment = {k: v for k, v in self.variables.items() if not k.startswith("SANDMILL_API")}
        samples = Samples("embedded")
        for _ in range(self.plan.starts):
            done = subprocess.run(
                [sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True
            )
            samples.values.append(float(done.stdout))
        return samples
