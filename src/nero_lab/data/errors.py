"""The exception of the data package."""


class DataError(RuntimeError):
    """Missing, damaged or unobtainable data. The message names the file and the remedy."""
