"""Makes unique names: random bytes, a number of this process, a counter."""

from itertools import count


class Names:
    """Gives out names of 32 hex digits; `instance` are 16 or more random ones."""

    def __init__(self, instance: str) -> None:
        self._beginning = instance[:16]
        self._numbers = count(1)

    def new(self) -> str:
        """Return a new name."""
        return f"{self._beginning}{next(self._numbers):016x}"
