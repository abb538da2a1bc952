"""Reading an object of a JSON file field by field, with errors that name the field and the reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

#: Stands for "there is no default": the field must be there.
REQUIRED = object()


class TraceError(ValueError):
    """What is wrong with a trace file, and where."""


class Fields:
    """``path`` is where the object stands in the file: ``jobs[2]``. Fields that nobody took are errors."""

    def __init__(self, path: str, value: object) -> None:
        if not isinstance(value, dict):
            raise TraceError(f"{path or 'the file'}: must be an object, is {value!r}")
        self.path = path
        self._left: dict[str, object] = dict(value)

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def wrong(self, name: str, reason: str) -> TraceError:
        return TraceError(f"{self.at(name)}: {reason}")

    def close(self) -> None:
        for name in sorted(self._left):
            raise self.wrong(name, "unknown field")

    def text(self, name: str, default: object = REQUIRED, among: Iterable[str] = ()) -> str:
        value, options = self._take(name, default), list(among)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, f"must be a text, is {value!r}")
        if options and value not in options:
            raise self.wrong(name, f"{value!r} is unknown; one of {', '.join(options)}")
        return value

    def flag(self, name: str) -> bool:
        value = self._take(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, is {value!r}")
        return value

    def number(
        self, name: str, default: object = REQUIRED, least: float = -math.inf, above: float = -math.inf
    ) -> float:
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.wrong(name, f"must be a number, is {value!r}")
        if value < least:
            raise self.wrong(name, f"must be at least {least:g}, is {value:g}")
        if value <= above:
            raise self.wrong(name, f"must be above {above:g}, is {value:g}")
        return float(value)

    def whole(self, name: str, default: object = REQUIRED, least: float = -math.inf) -> int:
        value = self.number(name, default, least)
        if value != int(value):
            raise self.wrong(name, f"must be a whole number, is {value:g}")
        return int(value)

    def has(self, name: str) -> bool:
        """Whether it is there and not null."""
        return self._left.get(name) is not None

    def inner(self, name: str) -> Fields:
        return Fields(self.at(name), self._take(name, REQUIRED))

    def objects(self, name: str, default: object = REQUIRED) -> Iterator[Fields]:
        value = self._take(name, default)
        if not isinstance(value, (list, tuple)):
            raise self.wrong(name, f"must be a list, is {value!r}")
        return (Fields(f"{self.at(name)}[{place}]", item) for place, item in enumerate(value))

    def _take(self, name: str, default: object) -> object:
        value = self._left.pop(name, None)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.wrong(name, "is missing")
        return default
