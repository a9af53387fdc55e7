"""The paper's experiments, one command each: ``nero list``, ``nero run``, ``nero sweep``, ``nero report``."""
