"""Grading: tests/ goes in, tests/test.sh runs, and the reward it wrote comes out, as Harbor does it."""

import json
import math
from dataclasses import dataclass
from typing import Any

from sandmill.errors import NotFoundError, SandmillError
from sandmill.rollouts.failures import GraderError
from sandmill.rollouts.workshop import Box
from sandmill.tasks import Task
from sandmill.wire import Result

VERIFIER_LOGS = "/logs/verifier"
REWARD_TEXT = f"{VERIFIER_LOGS}/reward.txt"
REWARD_JSON = f"{VERIFIER_LOGS}/reward.json"


@dataclass(frozen=True)
class Grade:
    reward: float
    rewards: dict[str, float]


async def verify(box: Box, task: Task) -> Result:
    """Runs tests/test.sh. Whatever lay in /tests and /logs/verifier is removed first: an attempt can't bring its own.

    Raises GraderError when it ran into its timeout (`verifier_timeout`) or could not be started.
    """
    ready = await box.run(
        f"rm -rf /tests {VERIFIER_LOGS} && mkdir -p /tests {VERIFIER_LOGS} && chmod 777 {VERIFIER_LOGS}", user="root"
    )
    if not ready.ok:
        raise GraderError(f"the tests could not be put in place: {ready.error_text.strip()}", code="verifier_failed")
    await box.upload(task.tests, "/tests")
    await box.run(["chmod", "+x", "/tests/test.sh"], user="root")
    limit = task.config.verifier_timeout_s
    return await box.run(
        ["/tests/test.sh"], env=task.config.verifier_env, user=task.config.verifier_user, timeout_s=limit
    )


def check_ending(result: Result) -> None:
    """A verifier that was cut off has no say, even if it wrote a reward before. Any exit code is fine: the file decides."""
    if result.reason == "timeout":
        raise GraderError(
            f"tests/test.sh ran into its timeout after {result.duration_s:.0f} s", code="verifier_timeout"
        )
    if result.reason in ("oom", "killed"):
        raise GraderError(f"tests/test.sh was ended: {result.reason}", code=f"verifier_{result.reason}")


async def read_grade(box: Box) -> Grade:
    """The reward in reward.json, else in reward.txt. Raises GraderError (`reward_missing`, `reward_invalid`)."""
    for path, parse in ((REWARD_JSON, parse_json), (REWARD_TEXT, parse_text)):
        try:
            return parse(await box.read(path))
        except NotFoundError:
            continue
        except GraderError:
            raise
        except SandmillError as error:
            if error.code in ("not_a_regular_file", "is_a_directory"):
                raise GraderError(f"{path} is not a regular file", code="reward_invalid") from error
            raise
    raise GraderError("tests/test.sh wrote neither reward.txt nor reward.json to /logs/verifier", code="reward_missing")


def parse_text(data: bytes) -> Grade:
    """One finite number."""
    try:
        value = float(data.decode())
    except ValueError as error:
        raise GraderError(f"reward.txt is not a number: {data[:80]!r}", code="reward_invalid") from error
    return Grade(_finite(value), {"reward": value})


def parse_json(data: bytes) -> Grade:
    """A number, or numbers by name, one of them `reward` (or only one at all)."""
    try:
        parsed: Any = json.loads(data)
    except ValueError as error:
        raise GraderError(f"reward.json is not JSON: {data[:80]!r}", code="reward_invalid") from error
    named = parsed if isinstance(parsed, dict) else {"reward": parsed}
    rewards = {str(name): _finite(value) for name, value in named.items()}
    if "reward" in rewards:
        return Grade(rewards["reward"], rewards)
    if len(rewards) == 1:
        return Grade(next(iter(rewards.values())), rewards)
    raise GraderError(f"reward.json has no 'reward' among {sorted(rewards)}", code="reward_invalid")


def _finite(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise GraderError(f"a reward must be a number, not {value!r}", code="reward_invalid")
    try:
        number = float(value)
    except OverflowError as error:
        raise GraderError("a reward must be finite", code="reward_invalid") from error
    if not math.isfinite(number):
        raise GraderError(f"a reward must be finite, not {value!r}", code="reward_invalid")
    return number
