"""The experiments of the paper as commands: ``nero list``, ``nero run``, ``nero sweep`` and ``nero report``."""
