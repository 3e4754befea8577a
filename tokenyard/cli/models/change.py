"""`tokenyard models load`, `unload`, `sleep`, `wake`, `reload`."""

from __future__ import annotations

from functools import partial
from typing import Final

from tokenyard.cli.shared.operating import command
from tokenyard.ops import models

#: Seconds that a command waits until all have obeyed.
_TIMEOUT_S: Final = 600.0
_change = partial(command, arguments=["model"], timeout_s=_TIMEOUT_S)

load = _change(models.load, "load", "Load one.")
unload = _change(models.unload, "unload", "Unload one.")
sleep = _change(models.sleep, "sleep", "Put its workers to sleep.")
wake = _change(models.wake, "wake", "Wake its workers.")
reload = command(models.reload, "reload", "Give it new weights.", arguments=["model"])
