"""Drafters that come with specjax: small ones, for its built-in target, trained by the scripts in `train/`.

    drafter = specjax.load_drafter("eagle3", specjax.load())

Each is a directory as `save_drafter` writes it, whose README.md has its recipe, its log and its figures.
"""

import os
from pathlib import Path

SHIPPED = ("eagle3", "medusa", "draft-model")


def shipped_path(name: str | os.PathLike[str]) -> Path | None:
    """The directory of the shipped drafter of that name; None for any other name."""
    return Path(__file__).parent / name if name in SHIPPED else None
