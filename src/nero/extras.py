"""Extras of the package, which install its optional dependencies."""


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra, for error messages.

    The package is on no index yet. A package of its name there would be somebody else's, so only a clone will do.

    Example:
        >>> print(how_to_install("cpu"))
        pip install '.[cpu]' in a clone of nero-optim
    """
    return f"pip install '.[{extra}]' in a clone of nero-optim"
