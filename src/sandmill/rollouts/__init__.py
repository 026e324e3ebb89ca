"""Rollouts: agents attempt tasks in sandboxes of their own, and are graded."""

from sandmill.rollouts.agents import Agent, CommandAgent, NopAgent, OracleAgent, agent_of
from sandmill.rollouts.evaluation import Evaluation, Limits
from sandmill.rollouts.records import Failure, Record, RecordLog, Times
from sandmill.rollouts.summary import Summary, pass_at_k, summarize
from sandmill.rollouts.workshop import Box, BoxSpec, Workshop

__all__ = [  # noqa: RUF022 grouped by what they are for
    # agents
    "Agent",
    "CommandAgent",
    "NopAgent",
    "OracleAgent",
    "agent_of",
    # running them
    "Box",
    "BoxSpec",
    "Evaluation",
    "Limits",
    "Workshop",
    # what came out
    "Failure",
    "Record",
    "RecordLog",
    "Summary",
    "Times",
    "pass_at_k",
    "summarize",
]
