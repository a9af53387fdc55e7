"""Entry point of the command ``nero``. Handles Ctrl-C while torch and the command line are still being imported."""

import os
import signal
from types import FrameType


def main() -> None:
    """Run :func:`nero_lab.cli.main`. An interrupt during the imports ends the process with one line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # an ignored SIGINT stays ignored
        signal.signal(signal.SIGINT, exit_now)
    try:
        from nero_lab.cli import main as run_command_line

        run_command_line()
    finally:
        raise_interrupts()


def exit_now(_: int, __: FrameType | None) -> None:
    """Print one line and exit. An exception could be swallowed by the import that it interrupts."""
    try:
        os.write(2, b"nero: stopped\n")
    finally:
        os._exit(130)


def raise_interrupts() -> None:
    """Make an interrupt raise KeyboardInterrupt again, as Python does by default."""
    if signal.getsignal(signal.SIGINT) is exit_now:
        signal.signal(signal.SIGINT, signal.default_int_handler)
