"""Drafters that come with specjax, for its built-in target: what `train/ship.py` puts here.

Each is a directory as `save_drafter` writes it, whose README.md has its recipe and its figures, with the log of its
training. `specjax.load_drafter` loads them by name. There is none yet.
"""

import os
from pathlib import Path

SHIPPED: tuple[str, ...] = ()


def shipped_path(name: str | os.PathLike[str]) -> Path | None:
    """The directory of the shipped drafter of that name; None for any other name."""
    return Path(__file__).parent / name if name in SHIPPED else None
