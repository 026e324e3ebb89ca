"""Two small tasks in Inspect's own terms, and a model that follows a script; test_inspect.py runs this file.

`python inspect_evals.py LOGS [lose|lose-once|hang]` prints what the logs hold as JSON. With `lose` the sandbox of one sample
is ended from outside in the middle of it; with `lose-once` Inspect runs that sample anew; with `hang` a command never ends.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from inspect_ai import Task, eval, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, ChatMessageTool, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Scorer, Target, accuracy, includes, scorer
from inspect_ai.solver import TaskState, basic_agent
from inspect_ai.tool import Tool, bash, python, tool
from inspect_ai.util import SandboxEnvironmentSpec, sandbox

from sandmill import Sandbox
from sandmill.clients.inspect import SandmillConfig, SandmillSandboxEnvironment

# Like Inspect's capture-the-flag examples: files and a set-up script come with the sample, the flag is hidden.
HIDE = "mkdir -p .cache/old && mv flag.txt .cache/old/notes && echo 'nothing here' > flag.txt"

# Like HumanEval: a function, judged by running its tests where it was written.
TESTS = """
from solution import below_zero
assert below_zero([1, 2, 3]) is False
assert below_zero([1, 2, -4, 5]) is True
assert below_zero([]) is False
"""
RIGHT = """
code = '''
def below_zero(operations):
    balance = 0
    for operation in operations:
        balance += operation
        if balance < 0:
            return True
    return False
'''
open("solution.py", "w").write(code)
exec(code)
print(below_zero([1, 2, -4, 5]))
"""
WRONG = """
open("solution.py", "w").write("def below_zero(operations): return sum(operations) < 0")
"""

Script = list[tuple[str, dict[str, Any]] | Callable[[list[ChatMessage]], tuple[str, dict[str, Any]]]]


def what_the_tool_said(messages: list[ChatMessage]) -> str:
    said = [message.text for message in messages if isinstance(message, ChatMessageTool)]
    return said[-1].strip()


SCRIPTS: dict[str, Script] = {
    "find the flag, patiently": [
        ("bash", {"command": "cat flag.txt; grep -rl 'flag{' ."}),
        lambda seen: ("bash", {"command": f"cat {what_the_tool_said(seen).splitlines()[-1]}"}),
        lambda seen: ("submit", {"answer": what_the_tool_said(seen)}),
    ],
    "find the flag, in haste": [
        ("bash", {"command": "cat flag.txt"}),
        lambda seen: ("submit", {"answer": what_the_tool_said(seen)}),
    ],
    "write below_zero, well": [
        ("python", {"code": RIGHT}),
        lambda seen: ("submit", {"answer": what_the_tool_said(seen)}),
    ],
    "write below_zero, badly": [("python", {"code": WRONG}), ("submit", {"answer": "done"})],
    "lose the sandbox": [
        ("end_from_outside", {}),
        ("bash", {"command": "echo still here"}),
        ("submit", {"answer": "still here"}),
    ],
    "wait": [("bash", {"command": "sleep 1000"})],
    "keep the sandbox": [
        ("bash", {"command": "echo still here"}),
        lambda seen: ("submit", {"answer": what_the_tool_said(seen)}),
    ],
}


def scripted(messages: list[ChatMessage], tools: Any, choice: Any, config: Any) -> ModelOutput:
    asked = next(message.text for message in messages if message.role == "user")
    step = SCRIPTS[asked][sum(message.role == "assistant" for message in messages)]
    name, arguments = step(messages) if callable(step) else step
    output = ModelOutput.for_tool_call("mockllm/model", name, arguments)
    output.usage = ModelUsage()  # without one the mock counts tokens, with a vocabulary that it downloads
    return output


@task
def flag() -> Task:
    files = {"flag.txt": "flag{it-was-there-all-along}\n"}
    names = ("find the flag, patiently", "find the flag, in haste")
    return Task(
        dataset=[
            Sample(name, id=name, target="flag{it-was-there-all-along}", files=files, setup=HIDE) for name in names
        ],
        solver=basic_agent(tools=[bash(timeout=30)]),
        scorer=includes(),
        sandbox="sandmill",
    )


@scorer(metrics=[accuracy()])
def passes_its_tests() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        await sandbox().write_file("test_solution.py", TESTS)
        result = await sandbox().exec(["python3", "test_solution.py"], timeout=30)
        return Score(value="C" if result.success else "I", explanation=result.stderr)

    return score


@task
def function() -> Task:
    names = ("write below_zero, well", "write below_zero, badly")
    config = SandmillConfig(user="user", workdir="/work", memory_mb=256)
    return Task(
        dataset=[Sample(name, id=name, target="") for name in names],
        solver=basic_agent(tools=[python(timeout=30)]),
        scorer=passes_its_tests(),
        sandbox=SandboxEnvironmentSpec("sandmill", config),
    )


lost: list[str] = []


@tool
def end_from_outside(times: int) -> Tool:
    async def execute() -> str:
        """Ends the sandbox as a failure of the infrastructure would."""
        if len(lost) < times:
            environment = sandbox().as_type(SandmillSandboxEnvironment)
            lost.append(environment._box.id)
            with Sandbox.connect(environment._box.id) as box:
                box.kill()
        return "done"

    return execute


@task
def losing(times: int) -> Task:
    names = ("lose the sandbox", "keep the sandbox")
    return Task(
        dataset=[Sample(name, id=name, target="still here") for name in names],
        solver=basic_agent(tools=[bash(timeout=30), end_from_outside(times)]),
        scorer=includes(),
        sandbox="sandmill",
    )


@task
def hanging() -> Task:
    return Task(dataset=[Sample("wait", id="wait")], solver=basic_agent(tools=[bash()]), sandbox="sandmill")


def main(logs: str, how: str = "") -> None:
    tasks = {"lose": [losing(99)], "lose-once": [losing(1)], "hang": [hanging()]}.get(how, [flag(), function()])
    done = eval(
        tasks,
        model=get_model("mockllm/model", custom_outputs=scripted),
        log_dir=logs,
        display="none",
        fail_on_error=False,
        retry_on_error=1 if how == "lose-once" else 0,
        max_tasks=len(tasks),
    )
    said = {}
    for log in done:
        assert log.samples is not None, log.error
        said[log.eval.task] = {
            "status": log.status,
            "samples": {
                sample.id: {
                    "scores": {name: score.value for name, score in (sample.scores or {}).items()},
                    "error": sample.error.message if sample.error else None,
                    "retries": len(sample.error_retries or []),
                }
                for sample in log.samples
            },
        }
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
