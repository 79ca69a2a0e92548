"""Takes the place of a client that has left, and of the handler of its call."""

from collections.abc import Callable

from router.server.exchange import HeaderLines, UpstreamStage
from router.server.heads import Headers


class NullSink:
    """Stands where the client stood that has left: the worker is left, too, as soon as its answer has begun."""

    __slots__ = ("_leave", "http_1_1")

    def __init__(self, leave: Callable[[], None]) -> None:
        """`leave` is called once, when the answer has begun."""
        self._leave = leave
        self.http_1_1 = True

    @property
    def connection_line(self) -> bytes:
        """Nothing."""
        return b""

    def reply(self, status: int, body: bytes, content_type: bytes, headers: HeaderLines) -> None:
        """Nobody is told."""

    def write(self, data: bytes) -> None:
        """Nobody reads."""

    def finish(self) -> None:
        """Nobody waits."""

    def cut(self) -> None:
        """Nobody is cut off."""

    def on_head(self, status: int, headers: Headers) -> bytes | None:  # noqa: ARG002 - whatever it is
        """Return no lines: any answer will do."""
        return b""

    def on_dropped(self) -> None:
        """There is no other worker to ask."""

    def on_first_byte(self) -> None:
        """The answer has begun: it is not wanted."""
        self._leave()

    def on_bytes(self) -> None:
        """Not heard of: the worker was left."""

    def on_end(self, tail: bytes, later_events: int) -> None:
        """It was short."""

    def on_cut(self, phase: UpstreamStage, reason: str) -> bytes | None:  # noqa: ARG002 - whatever it was
        """Return that nothing follows."""
        return None

    def on_failed(self, phase: UpstreamStage, reason: str, begun: bool) -> None:  # noqa: FBT001 - a callback's fact
        """Nobody waits."""

    def on_gone(self) -> None:
        """The worker was left."""
