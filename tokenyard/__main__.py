"""``python -m tokenyard`` and the command ``tokenyard``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tokenyard.process import interrupted
from tokenyard.process.extras import refuse


def run() -> None:
    """Run the command, from the first import to the last flush, and end the process.

    What an extra brings and is missing is told in one sentence.
    """
    interrupted.exit_on_interrupt()
    _leave_current_folder()
    try:
        from tokenyard.cli import main

        interrupted.raise_on_interrupt()
        # What the terminal cannot show is shown as an escape.
        for output in (sys.stdout, sys.stderr):
            if output is not None:
                output.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        main(prog_name="tokenyard")
    except ModuleNotFoundError as fault:
        refuse(fault)
    except KeyboardInterrupt:  # in the moments that `main` does not watch
        sys.exit(interrupted.SIGNALLED + 2)
    finally:
        interrupted.exit_on_interrupt()
        _flush()


def _leave_current_folder() -> None:
    """A user's ``worker.py`` where he happens to be is not our package.

    ``python -m`` looks there first, and so does ``PYTHONPATH=.``. Where we lie there ourselves, in
    a checkout, it stays.
    """
    try:
        here = Path.cwd()
    except OSError:  # it has been removed, so nothing lies there
        return
    if here != Path(__file__).resolve().parents[1]:
        sys.path[:] = [folder for folder in sys.path if folder and Path(folder) != here]


def _flush() -> None:
    """Flush standard output here: Python would print a traceback where nobody reads it any more."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    run()
