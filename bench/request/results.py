"""What the bench of one request found: by mode, and by shape of the request."""

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from bench.request.call_path import CallPath

_CHUNKS = 8
STREAMS = SHORT_CHUNKS, LONG_CHUNKS = 20, 220


class RequestShape(NamedTuple):
    """A kind of request: the bytes of its body, and the chunks of its answer; 0: the answer is no stream."""

    name: str
    body_bytes: int
    chunks: int


SHAPES = (
    RequestShape("300 B", 300, 0),
    RequestShape("300 B, streamed", 300, _CHUNKS),
    RequestShape("40 KB", 40_000, 0),
    RequestShape("40 KB, streamed", 40_000, _CHUNKS),
)


class ChunkPace(NamedTuple):
    """How the chunks of a stream come: `pause_ms` apart, 0: as fast as the sockets take them; streams at once."""

    name: str
    pause_ms: int
    connections: int

    @property
    def parameters(self) -> dict[str, int]:
        """What the clients are told."""
        return {"pause_ms": self.pause_ms, "connections": self.connections}

    @staticmethod
    def shapes() -> tuple[RequestShape, RequestShape]:
        """Return the short and the long stream."""
        short, long = (RequestShape(f"{chunks} chunks", SHAPES[0].body_bytes, chunks) for chunks in STREAMS)
        return short, long


PACES = (ChunkPace("in bursts", 0, 8), ChunkPace("every 5 ms", 5, 50))


class CpuUse(NamedTuple):
    """CPU microseconds of a unit: all, and the kernel's part."""

    cpu_us: float
    kernel_us: float


class Stages(NamedTuple):
    """Of one shape in one mode: shares of the stages, their calls in one request, the path to the first byte sent."""

    shares: dict[str, float]
    own: dict[str, float]
    """Shares of our functions, with the libraries that they call; most first."""
    moments: int
    calls: dict[str, float]
    path: CallPath | None
    """None, and no calls: the router is compiled."""


class EventsUse(NamedTuple):
    """CPU of the router while events come, by batch; and the rates at which they came."""

    batches_s: float
    blocks_s: float
    messages_s: float
    batch_us: float
    message_us: float
    idle_ms_s: float


class RequestResults:
    """All that was measured, by mode and shape."""

    def __init__(self) -> None:
        self.rounds: dict[tuple[str, str], list[CpuUse]] = {}
        self.stages: dict[tuple[str, str], Stages] = {}
        self.system_calls: dict[tuple[str, str], dict[str, float]] = {}
        self.objects: dict[tuple[str, str], dict[str, float]] = {}
        self.chunks: dict[tuple[str, str], CpuUse] = {}
        self.events: EventsUse | None = None
        self.absent: list[str] = []

    def cpu(self, mode: str, shape: str) -> CpuUse:
        """Return the medians of all rounds."""
        return medians(self.rounds[mode, shape])


def medians(found: Iterable[CpuUse]) -> CpuUse:
    """Return the median of each figure."""
    return CpuUse(*(median(each) for each in zip(*found, strict=True)))


def of_a_chunk(short: CpuUse, long: CpuUse, chunks: int) -> CpuUse:
    """Return what each of so many more chunks cost a long answer."""
    return CpuUse(*((more - less) / chunks for less, more in zip(short, long, strict=True)))
