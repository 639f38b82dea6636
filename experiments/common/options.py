"""What the scripts' options have in common: checks before anything is loaded, and how results write them down."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from specjax import InputError


def check_least(options: Any, **least: int) -> None:
    """Raise InputError for an option below its least value, or one of several; None is no value, and passes."""
    for name, limit in least.items():
        given = getattr(options, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and value < limit:
                raise InputError(f"--{name.replace('_', '-')}: expected at least {limit}, got {value}")


def check_some(options: Any, *names: str) -> None:
    """Raise InputError for an option of several values that has none, or one of them twice."""
    for name in names:
        values = getattr(options, name)
        option = f"--{name.replace('_', '-')}"
        if not values:
            raise InputError(f"{option}: expected one value or more")
        if len(set(values)) < len(values):
            twice = next(value for value in values if values.count(value) > 1)
            raise InputError(f"{option}: {twice} is given twice")


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise InputError(f"--seed: expected a whole number from 0 to 2**32 - 1, got {seed}")


def settings_of(options: Any) -> dict[str, Any]:
    """A script's options (a dataclass), as JSON has them."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
