"""The SDK: `Sandbox` and `AsyncSandbox`."""

from sandmill.sdk.filecalls import Entry
from sandmill.sdk.process import Output, Process, Session
from sandmill.sdk.sandbox import Sandbox, prepare

__all__ = ["Entry", "Output", "Process", "Sandbox", "Session", "prepare"]
