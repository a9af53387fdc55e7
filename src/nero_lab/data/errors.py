"""The one error of this package."""


class DataError(RuntimeError):
    """Data that is not there, is broken, or cannot be brought; it says which file, and what to do."""
