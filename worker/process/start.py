"""What every process of the pool does first."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection

from setproctitle import setproctitle

from tokenyard.process import logs
from tokenyard.process.interpreter import collect_seldom, deepen_main, end_with_threads


def start_process(title: str, log_level: int, output: Connection) -> None:
    """Prepare a process that its controller has just forked; it ends when the controller does.

    Standard error goes to ``output``, where the controller keeps the last lines.
    """
    os.dup2(output.fileno(), 2)
    output.close()
    faulthandler.enable(all_threads=False)
    # The controller decides when to stop; a Ctrl-C in the terminal reaches its processes too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setproctitle(title)
    logs.start(log_level)
    deepen_main()  # vLLM looks at a grammar before it is compiled
    end_with_threads()  # without its reader or publisher a lane would never be served
    collect_seldom()
    threading.Thread(target=_die_with_controller, name="controller", daemon=True).start()


def _die_with_controller() -> None:
    """End when the controller does: nobody renews the lease then, and the lane is rescued."""
    # Not `os.getppid`: it would miss a controller that died before this line.
    controller = multiprocessing.parent_process()
    if controller is not None:
        controller.join()
        os._exit(1)
