"""The experiments of the paper."""
