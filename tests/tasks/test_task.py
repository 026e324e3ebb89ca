"""Task folders: what is read, and what is said about what can't be."""

from pathlib import Path

import pytest

from sandmill.errors import UsageError
from sandmill.tasks import Copy, Run, Task, TaskError, Wheels, find_tasks

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"


def write(folder: Path, **files: str) -> Path:
    plain = {
        "task.toml": "",
        "instruction.md": "Do it.",
        "environment/prepare.toml": "",
        "tests/test.sh": "#!/bin/sh\n",
    }
    for name, text in (
        plain | {key.replace("__", "/").replace("_DOT_", "."): text for key, text in files.items()}
    ).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def problems(folder: Path) -> list[str]:
    with pytest.raises(TaskError) as caught:
        Task.load(folder)
    found: list[str] = caught.value.details["problems"]
    return [line.removeprefix(f"{folder}/") for line in found]


def test_what_is_read(tmp_path: Path) -> None:
    task = Task.load(
        write(
            tmp_path / "t",
            task_DOT_toml='[agent]\ntimeout_sec = 5\nuser = 1000\n[environment]\nmemory = "2G"\ncpus = 2\n'
            'allow_internet = true\n[verifier]\nnetwork_mode = "no-network"\n',
            instruction_DOT_md="<!-- canary GUID x -->\nDo it.",
            environment__prepare_DOT_toml='[[steps]]\nrun = "make"\n[[steps]]\ncopy = "a"\nto = "/x"\n'
            '[[steps]]\nwheels = ["six==1.16.0"]\nto = "/y"\n',
            environment__a="A",
        )
    )
    assert task.instruction == "Do it."
    assert (task.config.agent_timeout_s, task.config.agent_user, task.config.memory_mb) == (5.0, "1000", 2048)
    assert (task.config.agent_network, task.config.verifier_network) == ("all", "none")
    run, copy, wheels = task.environment.steps
    assert isinstance(run, Run)
    assert isinstance(copy, Copy)
    assert wheels == Wheels(("six==1.16.0",), "/y")


def test_no_network_unless_said() -> None:
    assert all(task.config.agent_network == "none" for task in find_tasks(EXAMPLES))


def test_every_problem_at_once(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "t",
        task_DOT_toml='[agent]\ntimeout_sec = "long"\n[environment]\ncpus = -1\ngpus = 1\nnetwork_mode = "some"\ncolour = 1\n',
        instruction_DOT_md=" ",
        environment__prepare_DOT_toml='[[steps]]\nrun = "x"\ncopy = "y"\n[[steps]]\nwheels = ["six"]\nto = "y"\n',
    )
    found = problems(folder)
    assert [line.split(": ")[:2] for line in found] == [
        ["task.toml", "environment.network_mode"],
        ["task.toml", "agent.timeout_sec"],
        ["task.toml", "environment.cpus"],
        ["task.toml", "environment.gpus"],
        ["task.toml", "environment.colour"],
        ["instruction.md", "is empty"],
        ["environment/prepare.toml", "steps[0].run|copy|wheels"],
        ["environment/prepare.toml", "steps[1].to"],
        ["environment/prepare.toml", "steps[1].wheels"],
    ]


def test_problems_of_all_tasks(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, task_DOT_toml="steps = [1]\n")
    with pytest.raises(TaskError, match="2 problems"):
        find_tasks(tmp_path)


def test_not_toml(tmp_path: Path) -> None:
    assert problems(write(tmp_path / "t", task_DOT_toml="[agent"))[0].startswith("task.toml: not TOML")


def test_a_copy_stays_in_the_environment(tmp_path: Path) -> None:
    text = '[[steps]]\ncopy = "../tests"\nto = "/x"\n'
    assert "steps[0].copy" in problems(write(tmp_path / "t", environment__prepare_DOT_toml=text))[0]


def test_variables_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNOWN", "k")
    folder = write(tmp_path / "t", task_DOT_toml='[environment.env]\nA = "${KNOWN}-${UNKNOWN_X:-d}"\n')
    assert Task.load(folder).config.env == {"A": "k-d"}
    (folder / "task.toml").write_text('[environment.env]\nA = "${UNKNOWN_X}"\n')
    assert "UNKNOWN_X is not set" in problems(folder)[0]


def test_hash_follows_content_alone(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two")
    assert Task.load(one).content_hash == Task.load(two).content_hash
    (two / "tests" / "__pycache__").mkdir()
    (two / "tests" / "__pycache__" / "x.pyc").write_text("")
    assert Task.load(one).content_hash == Task.load(two).content_hash
    (two / "tests" / "test.sh").chmod(0o755)
    assert Task.load(one).content_hash != Task.load(two).content_hash


def test_no_tasks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tasks"):
        find_tasks(tmp_path)
    with pytest.raises(UsageError, match="there is no folder"):
        find_tasks(tmp_path / "missing")


def test_the_examples() -> None:
    tasks = find_tasks(EXAMPLES)
    assert len(tasks) >= 10
    for task in tasks:
        assert (task.folder / "environment" / "Dockerfile").is_file()
        assert (task.solution / "solve.sh").stat().st_mode & 0o111


def without_prepare(folder: Path) -> Path:
    (folder / "environment" / "prepare.toml").unlink()
    return folder


def test_a_dockerfile_alone(tmp_path: Path) -> None:
    folder = without_prepare(write(tmp_path / "t", environment__Dockerfile="FROM a\nRUN make\n"))
    environment = Task.load(folder).environment
    assert (environment.dockerfile, environment.network) == (folder / "environment" / "Dockerfile", "all")
    (folder / "environment" / "prepare.toml").write_text("")
    assert Task.load(folder).environment.dockerfile is None
    named = write(folder, task_DOT_toml='[environment]\ndocker_image = "mine"\n')
    assert (Task.load(without_prepare(named)).environment.image, named.exists()) == ("mine", True)


def test_problems_of_a_dockerfile(tmp_path: Path) -> None:
    text = "FROM a\nONBUILD RUN x\nFRMO\n"
    files = {"environment__Dockerfile": text, "environment__docker-compose_DOT_yaml": "x"}
    found = problems(without_prepare(write(tmp_path / "t", **files)))
    assert [line.split(": ")[:2] for line in found] == [
        ["environment/docker-compose.yaml", "tasks of several containers are not supported"],
        ["environment/Dockerfile", "line 2"],
        ["environment/Dockerfile", "line 3"],
    ]


def test_neither_of_them(tmp_path: Path) -> None:
    assert "so is a Dockerfile" in problems(without_prepare(write(tmp_path / "t")))[0]
