"""Task folders in Harbor's layout, and what their environments are made of."""

from sandmill.tasks.config import TaskConfig
from sandmill.tasks.environment import Copy, Environment, Run, Step, Wheels
from sandmill.tasks.problems import TaskError
from sandmill.tasks.task import Task, find_tasks

__all__ = ["Copy", "Environment", "Run", "Step", "Task", "TaskConfig", "TaskError", "Wheels", "find_tasks"]
