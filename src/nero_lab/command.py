"""The command ``nero`` as it is installed: beside the package, whose imports take seconds that Ctrl-C may fall into."""

import os
import signal
from types import FrameType


def main() -> None:
    """The command of :mod:`nero_lab.cli`; where it is interrupted before it can see to that, it ends in a line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # where interrupts are ignored, they stay so
        signal.signal(signal.SIGINT, stop)
    try:
        from nero_lab.cli import main as command

        command()
    finally:
        raise_interrupts()


def stop(_: int, __: FrameType | None) -> None:
    """End at once with a line. What is raised into an import may be lost there: torch goes on without numpy, say."""
    try:
        os.write(2, b"nero: stopped\n")
    finally:
        os._exit(130)


def raise_interrupts() -> None:
    """From now on an interrupt is raised, as is Python's way, for whoever has something to keep or to clear away."""
    if signal.getsignal(signal.SIGINT) is stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)
