"""Errors written for the person who made the mistake: one line, what was given, what was expected, what to do."""


class SpecjaxError(ValueError):
    """Base class of everything specjax raises on purpose; command lines print it without a traceback."""


class InputError(SpecjaxError):
    """An argument, option or prompt that cannot be used as given."""


class CheckpointError(SpecjaxError):
    """A checkpoint, tokenizer or configuration file that is missing, damaged, unknown or does not fit."""
