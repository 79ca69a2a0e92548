"""A bug that is planted: where, what, and in which worlds it must show."""

from typing import NamedTuple

from tests.simulation.setup import Kind


class Planted(NamedTuple):
    """`bug` takes the place of what is there; one of the first `within` seeds of `kind` must fail."""

    place: str
    bug: object
    kind: Kind
    within: int
    beside: tuple[str, object] | None = None
    """Another bug and its place, without which this one would be harmless."""
    found_by: int = 0
    """The seed that is tried first: one that found the bug when it was planted. Changed worlds may need another."""

    @property
    def name(self) -> str:
        """What the bug does."""
        return getattr(self.bug, "__name__", str(self.bug))
