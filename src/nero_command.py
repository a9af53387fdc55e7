"""The command ``nero`` as it is installed: beside the package, whose imports take seconds that Ctrl-C may fall into."""

import sys


def main() -> None:
    """The command of :mod:`nero.paper.cli`; where it is interrupted before it can see to that, it ends in a line."""
    try:
        from nero.paper.cli import main as command

        command()
    except KeyboardInterrupt:
        print("nero: stopped", file=sys.stderr)
        sys.exit(130)
