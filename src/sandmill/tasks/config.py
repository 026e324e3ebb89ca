"""task.toml: limits, timeouts and the network of a task."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sandmill.tasks.problems import Problems, Table

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_NETWORKS = {"no-network": "none", "public": "all"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([GMK])", re.IGNORECASE)
_MB = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


@dataclass(frozen=True)
class TaskConfig:
    """What task.toml says. Times are seconds; None: no limit of its own."""

    agent_timeout_s: float = 3600.0
    verifier_timeout_s: float = 600.0
    build_timeout_s: float = 600.0
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    agent_network: str = "none"
    """`none` unless the task says otherwise in so many words (Harbor's own default is a public network)."""
    verifier_network: str = "none"
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    agent_user: str | None = None
    verifier_user: str | None = None
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    solution_env: Mapping[str, str] = field(default_factory=dict)
    docker_image: str | None = None


def read_config(file: Path, data: object, problems: Problems) -> TaskConfig:
    """Reads a parsed task.toml; what is wrong goes to `problems`."""
    root = Table(file, "", data, problems)
    root.ignore("version", "schema_version", "task", "metadata", "source", "artifacts", "multi_step_reward_strategy")
    root.refuse("steps", "tasks of several steps are not supported")
    agent, verifier = root.table("agent"), root.table("verifier")
    environment, solution = root.table("environment"), root.table("solution")
    base = _network(environment, "none")
    config = TaskConfig(
        agent_timeout_s=agent.positive("timeout_sec") or TaskConfig.agent_timeout_s,
        verifier_timeout_s=verifier.positive("timeout_sec") or TaskConfig.verifier_timeout_s,
        build_timeout_s=environment.positive("build_timeout_sec") or TaskConfig.build_timeout_s,
        cpus=environment.positive("cpus"),
        memory_mb=_megabytes(environment, "memory"),
        storage_mb=_megabytes(environment, "storage"),
        agent_network=_network(agent, base),
        verifier_network=_network(verifier, base),
        env=_resolved(environment),
        workdir=environment.text("workdir"),
        agent_user=_user(agent),
        verifier_user=_user(verifier),
        verifier_env=_resolved(verifier),
        solution_env=_resolved(solution),
        docker_image=environment.text("docker_image"),
    )
    if str(environment.raw("os") or "linux").lower() != "linux":
        environment.problem("os", "only linux is supported")
    for key in ("gpus", "gpu_types", "tpu"):
        environment.refuse(key, "accelerators are not supported")
    for key in ("mcp_servers", "skills_dir", "healthcheck"):
        environment.refuse(key, "not supported")
    for key in ("environment", "collect"):
        verifier.refuse(key, "not supported")
    # Both modes are served by how the run grades: in a fresh sandbox, or with --grade-in-place.
    verifier.ignore("environment_mode")
    for table in (root, agent, verifier, environment, solution):
        table.finish()
    return config


def _network(table: Table, default: str) -> str:
    mode = table.text("network_mode")
    if mode == "allowlist":
        table.problem("network_mode", "lists of allowed hosts are not supported; use no-network or public")
    elif mode is not None and mode not in _NETWORKS:
        table.problem("network_mode", f"must be no-network or public, not {mode!r}")
    table.refuse("allowed_hosts", "lists of allowed hosts are not supported")
    internet = table.raw("allow_internet") if table.name == "environment" else None
    if internet is not None and not isinstance(internet, bool):
        table.problem("allow_internet", "must be true or false")
    if mode is not None:
        return _NETWORKS.get(mode, default)
    return "all" if internet is True else default


def _megabytes(table: Table, key: str) -> int | None:
    """`memory_mb = 512`, or the older `memory = "512M"`."""
    mb = table.count(f"{key}_mb")
    old = table.text(key)
    if old is None:
        return mb
    parsed = _SIZE.fullmatch(old.strip())
    if parsed is None:
        table.problem(key, f"must be a size such as '2G' or '512M', not {old!r}")
        return mb
    size = int(float(parsed[1]) * _MB[parsed[2].upper()])
    if mb is not None and mb != size:
        table.problem(key, f"says {size} MB where {key}_mb says {mb}")
    return mb if mb is not None else size


def _user(table: Table) -> str | None:
    value = table.raw("user")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    table.problem("user", f"must be a name or a uid, not {value!r}")
    return None


def _resolved(table: Table) -> dict[str, str]:
    """An env table with `${NAME}` and `${NAME:-default}` taken from this process's environment."""
    resolved = {}
    for name, value in table.texts("env").items():
        for reference in _REFERENCE.finditer(value):
            if reference[1] not in os.environ and reference[2] is None:
                table.problem(f"env.{name}", f"the variable {reference[1]} is not set here")
        resolved[name] = _REFERENCE.sub(lambda found: os.environ.get(found[1], found[2] or ""), value)
    return resolved
