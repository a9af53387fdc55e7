"""Ctrl-C before the command line runs: one line, and out."""

import os
import signal
from types import FrameType


def handle_at_once() -> None:
    """Exit at the first interrupt, unless the process ignores interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_now)


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
