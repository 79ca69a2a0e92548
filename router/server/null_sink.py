"""Takes the place of a client that has left, and of the handler of its call."""

from collections.abc import Callable

from router.server.exchange import HeaderLines, UpstreamStage
from router.server.heads import Headers


class NullSink:
    """Replaces a client that has left: the worker's connection is closed as soon as its answer has begun."""

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
        """Do nothing."""

    def write(self, data: bytes) -> None:
        """Drop the bytes."""

    def finish(self) -> None:
        """Do nothing."""

    def cut(self) -> None:
        """Do nothing."""

    def on_head(self, status: int, headers: Headers) -> bytes | None:  # noqa: ARG002 - whatever it is
        """Return no lines: every answer is accepted."""
        return b""

    def on_dropped(self) -> None:
        """Do nothing: no other worker is tried."""

    def on_first_byte(self) -> None:
        """The answer has begun: close the worker's connection."""
        self._leave()

    def on_bytes(self) -> None:
        """Never called: the worker's connection is closed by then."""

    def on_end(self, tail: bytes, later_events: int) -> None:
        """The answer ended before the connection was closed."""

    def lost(self, quiet_s: float, begun: bool) -> str:  # noqa: ARG002, FBT001 - the call's own limits hold
        """Return nothing: no other worker is tried."""
        return ""

    def on_cut(self, phase: UpstreamStage, reason: str) -> bytes | None:  # noqa: ARG002 - whatever it was
        """Return None: the stream ends."""
        return None

    def on_failed(self, phase: UpstreamStage, reason: str, begun: bool) -> None:  # noqa: FBT001 - a callback's fact
        """Do nothing."""

    def on_gone(self) -> None:
        """The worker's connection was closed."""
