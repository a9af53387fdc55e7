"""Entry point of the command ``nero``. Handles Ctrl-C while torch and the command line are still being imported."""

from nero_lab import interrupts


def main() -> None:
    """Run :func:`nero_lab.cli.main`. An interrupt during the imports ends the process with one line."""
    interrupts.handle_at_once()
    try:
        from nero_lab.cli import main as run_command_line

        run_command_line()
    finally:
        interrupts.raise_interrupts()


if __name__ == "__main__":
    main()
