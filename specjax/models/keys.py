"""Reading a JSON object's keys with errors that name the file and the key."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from specjax.errors import CheckpointError


class Keys:
    """The keys of one JSON object, for example a `config.json`.

    Attributes:
        values: the object.
        source: the file it came from, for messages.
        defaults: values of absent keys (a null in the file stays null).
    """

    def __init__(self, values: Mapping[str, Any], source: str, defaults: Mapping[str, Any] = MappingProxyType({})):
        self.values, self.source, self.defaults = values, source, defaults

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {text}")

    def has(self, key: str) -> bool:
        return key in self.values or key in self.defaults

    def get(self, key: str) -> Any:
        """The value, the default where the key is absent, or None."""
        return self.values.get(key, self.defaults.get(key))

    def number(self, key: str, *, default: float | None = None, minimum: float | None = None) -> float:
        """A finite number, positive or at least `minimum`. `default` stands for null; without it null is an error."""
        value = default if self.get(key) is None else self.get(key)
        if value is None:
            raise self.error(f"missing key {key!r}")
        least, expected = (0, "a positive number") if minimum is None else (minimum, f"a number of at least {minimum}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= value < float("inf") or (minimum is None and value == 0):
            raise self.error(f"{key!r} is {value!r}, expected {expected}")
        return float(value)

    def integer(self, key: str, *, default: int | None = None, minimum: int = 1) -> int:
        value = self.number(key, default=default, minimum=minimum)
        if value != int(value):
            raise self.error(f"{key!r} is {value!r}, expected a whole number")
        return int(value)

    def flag(self, key: str) -> bool:
        """True or false; null and absent are false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{key!r} is {value!r}, expected true or false")
        return bool(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: none, one or a list."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.error(f"{key!r} is {value!r}, expected a token id or a list of them")
        return tuple(ids)

    def mapping(self, key: str) -> dict[str, Any]:
        """An object; null and absent are empty."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(f"{key!r} is {value!r}, expected an object")
        return dict(value or {})
