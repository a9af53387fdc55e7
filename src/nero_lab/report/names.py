"""Display names of contenders and data sets."""

import re

#: Display name of each contender, in the order of the tables.
CONTENDERS = {
    "nero": "Nero",
    "sgd": "SGD",
    "adam": "Adam",
    "lamb": "LAMB",
    "lamb-balanced": "LAMB (balanced)",
    "madam": "Madam",
    "madam-balanced": "Madam (balanced)",
    "sigma-1": "σ = 1",  # noqa: RUF001
    "sigma-100": "σ = 100",  # noqa: RUF001
    "nero-neither": "Nero (neither constraint)",
    "nero-mean": "Nero (mean only)",
    "nero-norm": "Nero (norm only)",
    "nero-both": "Nero (both constraints)",
    "lamb-momentum": "LAMB (momentum 0.9)",
    "adam-momentum": "Adam (momentum 0.9)",
    "nero-scaled": "Nero (scaled words)",
    "sgd-decay": "SGD (weight decay)",
    "nero-tuned": "Nero (tuned)",
    "nero-free-gains": "Nero (tuned, gains free)",
    "adamw-clipped": "AdamW (clipped)",
    "nero-momentum": "Nero (momentum)",
    "nero-momentum-free": "Nero (momentum, free)",
    "nero-auto": 'Nero ("auto")',
    "nero-momentum-auto": 'Nero (momentum, "auto")',
    "muon-balanced": "Muon (balanced)",
    "adamw-balanced": "AdamW (balanced)",
    "muon": "Muon",
    "normuon": "NorMuon",
    "soap": "SOAP",
    "lion": "Lion",
    "adamw": "AdamW",
}


def display_name(contender: str) -> str:
    """Return a contender's display name; an unknown contender keeps its own name."""
    return CONTENDERS.get(contender, contender)


def dataset_name(data: str) -> str:
    """Return a data set's name without the fingerprint of its files.

    Example:
        >>> dataset_name("cats-3-classes-1200-images-of-64-0123abcd")
        'cats (3 classes, 1,200 images)'
    """
    match = re.fullmatch(r"(.+)-(\d+)-classes-(\d+)-images-of-\d+-[0-9a-f]{8}", data)
    return f"{match[1]} ({int(match[2]):,} classes, {int(match[3]):,} images)" if match else data
