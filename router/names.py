"""Makes unique names: random bytes, a number of this process, a counter."""

from itertools import count


class Names:
    """Gives out names of 32 hex digits; `instance` are 16 or more random ones."""

    def __init__(self, instance: str) -> None:
        self.new = map((instance[:16] + "%016x").__mod__, count(1)).__next__
        """Return a new name."""
