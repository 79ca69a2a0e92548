"""Captures: KV event frames that a real engine published, with the requests it served and what it reused for each.

    capture = msgpack {block_size, frames, requests, ...}, plain or gzip; other keys are not read
    frame   = [unix time, [topic, sequence (8 bytes, big-endian), payload]], in the order of publication; sequences that
              go back are of several publishers, one for each data-parallel rank, which the payload names
    request = {round, t, prompt, cached, ...}: prompt tokens, and how many of them the engine took from its cache

Requests of one round ran together; `t` is the unix time at which their round had ended. A capture is foreign input:
an error names the place, the found and the allowed value.
"""

import gzip
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple, cast

import msgspec

from kv_protocol.errors import UNDECODABLE, LimitExceeded, MalformedMessage
from kv_protocol.ids import BLOCK_SIZE_MAX, TokenId, checked_dp_rank
from worker_agent.events.dialects.engine_wire import PAYLOAD_BYTES_MAX, decode_sequence

CAPTURE_BYTES_MAX = 256 << 20
"""Unpacked; an hour of a busy engine. Tokens take about ten times as much memory as bytes of a capture."""
SEQUENCE_JUMP_MAX = 1 << 31
"""How many frames a recorder may have missed between two, or before the first."""
TIME_S_MAX = 9e9
_ALLOWED = "a capture, msgpack {block_size, frames, requests}, plain or gzip"
_GZIP_MAGIC = b"\x1f\x8b"

Time = Annotated[float, msgspec.Meta(ge=0, le=TIME_S_MAX)]


class CaptureUnreadable(Exception):
    """A file that is no capture; the message names the file, what was found and what is allowed."""


class CapturedRequest(msgspec.Struct, frozen=True, rename={"end_s": "t"}):
    """One request; `cached` is in tokens, `end_s` the unix time at which its round had ended."""

    round: int
    end_s: Time
    prompt: list[TokenId]
    cached: Annotated[int, msgspec.Meta(ge=0)]

    def __post_init__(self) -> None:
        if self.cached > len(self.prompt):
            raise ValueError(f"cached: found {self.cached}, allowed 0..{len(self.prompt)}, the prompt's tokens")


class CapturedFrame(NamedTuple):
    """One message of an engine's publisher, and the unix time at which it was recorded.

    `publisher` is None where the engine has one; else the data-parallel rank that this one is of.
    """

    time_s: float
    topic: bytes
    sequence: int
    payload: bytes
    publisher: int | None = None


class Round(NamedTuple):
    """Requests that ran together, and the unix time at which all had ended."""

    end_s: float
    requests: tuple[CapturedRequest, ...]


class Capture(NamedTuple):
    """A complete capture; rounds in their order, frames in that of publication."""

    block_size: int
    frames: tuple[CapturedFrame, ...]
    rounds: tuple[Round, ...]

    @property
    def publishers(self) -> tuple[int | None, ...]:
        """The publishers of its frames; at least one."""
        return tuple(dict.fromkeys(frame.publisher for frame in self.frames)) or (None,)


class _CaptureFile(msgspec.Struct):
    block_size: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_SIZE_MAX)]
    frames: list[tuple[Time, tuple[bytes, bytes, bytes]]]
    requests: list[CapturedRequest]


class _Head(msgspec.Struct, array_like=True):
    time_s: msgspec.Raw
    events: msgspec.Raw
    dp_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(_CaptureFile)
_decode_head = msgspec.msgpack.Decoder(_Head).decode


def load_capture(path: Path) -> Capture:
    """Return the capture in a file.

    Raises:
        CaptureUnreadable: there is no file, or it is no capture.
    """
    try:
        wire = _decoder.decode(_unpacked(path))
        frames = _frames(wire.frames)
    except (LimitExceeded, MalformedMessage) as error:
        raise CaptureUnreadable(f"{path}: {error}") from error
    except (*UNDECODABLE, OSError, EOFError, zlib.error) as error:
        raise CaptureUnreadable(f"{path}: {error}; allowed: {_ALLOWED}") from error
    return Capture(wire.block_size, frames, _rounds(wire.requests))


def _unpacked(path: Path) -> bytes:
    with path.open("rb") as file:
        is_packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        file.seek(0)
        stream = cast("BinaryIO", gzip.GzipFile(fileobj=file)) if is_packed else file
        data = stream.read(CAPTURE_BYTES_MAX + 1)
    if len(data) > CAPTURE_BYTES_MAX:
        raise LimitExceeded("size", f"more than {CAPTURE_BYTES_MAX} bytes", f"{CAPTURE_BYTES_MAX} bytes unpacked")
    return data


def _frames(wire: Sequence[tuple[float, tuple[bytes, bytes, bytes]]]) -> tuple[CapturedFrame, ...]:
    frames = [
        CapturedFrame(time_s, topic, decode_sequence(sequence), payload) for time_s, (topic, sequence, payload) in wire
    ]
    if any(after.sequence <= before.sequence for before, after in pairwise(frames)):
        frames = [frame._replace(publisher=_rank_of(frame.payload)) for frame in frames]
    newest: dict[int | None, int] = {}
    for at, frame in enumerate(frames):
        before = newest.get(frame.publisher, -1)
        if not 0 < frame.sequence - before <= SEQUENCE_JUMP_MAX:
            allowed = f"{before + 1}..{before + SEQUENCE_JUMP_MAX}, after {before} of the same publisher"
            raise LimitExceeded(f"sequence of frame {at}", frame.sequence, allowed)
        if len(frame.payload) > PAYLOAD_BYTES_MAX:
            raise LimitExceeded(f"payload of frame {at}", f"{len(frame.payload)} bytes", f"{PAYLOAD_BYTES_MAX}")
        newest[frame.publisher] = frame.sequence
    return tuple(frames)


def _rank_of(payload: bytes) -> int:
    try:
        dp_rank = _decode_head(payload).dp_rank or 0
    except UNDECODABLE:
        return 0
    return checked_dp_rank(dp_rank)


def _rounds(requests: Sequence[CapturedRequest]) -> tuple[Round, ...]:
    together: dict[int, list[CapturedRequest]] = {}
    for request in sorted(requests, key=lambda request: request.round):
        together.setdefault(request.round, []).append(request)
    return tuple(Round(max(request.end_s for request in each), tuple(each)) for each in together.values())
