"""Errors written for the person who made the mistake: one line, what was given, what was expected, what to do."""

from typing import Any


class SpecjaxError(ValueError):
    """Base class of everything specjax raises on purpose; command lines print it without a traceback."""


class InputError(SpecjaxError):
    """An argument, option or prompt that cannot be used as given."""


class CheckpointError(SpecjaxError):
    """A checkpoint, tokenizer or configuration file that is missing, damaged, unknown or does not fit."""


class TrainingError(SpecjaxError):
    """A training run that cannot go on: a loss that is not finite, a figure that is missing."""


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise InputError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name}: expected a whole number of at least {least}, got {value!r}")


def check_block_sizes(sizes: Any) -> None:
    """Raise InputError unless `sizes` is None or block sizes that a ladder can be made of."""
    if sizes is None:
        return
    if not isinstance(sizes, tuple) or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise InputError(f"block_sizes: expected a tuple of positive whole numbers, or None, got {sizes!r}")
