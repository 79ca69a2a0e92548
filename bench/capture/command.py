"""`indexer check-capture`: did the events predict what the engine reused for each request?

For each round, in order:

    1  every frame recorded up to the end of the previous round is applied
    2  the prediction for each request is the longest prefix of its prompt, without the last token, that is held
       according to the events (full blocks, all tiers; of several data-parallel ranks the longest: requests name none)
    3  exact      the prediction equals what the engine took from its cache
       explained  the request is exact, or the prediction equals it after some block change of the request's own round
       under      the request is not exact: less was predicted than the engine took; over: more was

An engine decides in the middle of a round, from a state that is not known before: `explained` covers that. The last
token is never reused: an engine has to compute something.

The check uses the decoder and the mirror of the agent. It applies the mirror's changes in steps, one block at a time:

    n blocks stored by one event     n steps
    n blocks removed by one event    n steps
    a clear                          one step
    a loss of frames                 one step for each rank of the publisher

At the end of each frame the caches equal what an index that follows the agent would hold.

A capture: KV event frames that a real engine published, with the requests it served and what it reused for each.

    capture = msgpack {block_size, frames, requests, ...}, plain or gzip; other keys are not read
    frame   = [unix time, [topic, sequence (8 bytes, big-endian), payload]], in the order of publication; if
              a sequence goes back or repeats, there are several publishers, one for each data-parallel rank, which the
              payload names
    request = {round, t, prompt, cached, ...}: prompt tokens, and how many of them the engine took from its cache

Requests of one round ran together; `t` is the unix time at which their round had ended. A capture is foreign input:
an error names what was found and what is allowed, and the place in the capture if that is known.
"""

import gzip
import sys
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple, cast

import click
import msgspec
from rich.console import Console

from bench.tables import FigureTable, progress, rich_table
from kv_protocol.errors import UNDECODABLE, LimitExceeded, MalformedMessage
from kv_protocol.events import Cleared, Event, Stored, Tier
from kv_protocol.hashing import sequence_hashes
from kv_protocol.ids import BLOCK_SIZE_MAX, DP_RANK_MAX, TokenId, checked_dp_rank
from worker_agent.events.dialects.batches import PAYLOAD_BYTES_MAX, BatchDecoder, decode_sequence
from worker_agent.events.engine_events import EngineBatch, EngineCleared
from worker_agent.events.mirror import ENGINE, RankMirror

CAPTURE_BYTES_MAX = 256 << 20
"""The most bytes of an unpacked capture: an hour of a busy engine has fewer.

The tokens take about ten times as many bytes in memory as in the capture.
"""
SEQUENCE_JUMP_MAX = 1 << 31
"""The largest step of the sequence from one frame of a publisher to its next; the first step is counted from -1."""
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

    `publisher` is None if the engine has one publisher; otherwise it is the data-parallel rank of that publisher.
    """

    time_s: float
    sequence: int
    payload: bytes
    publisher: int | None = None


class Round(NamedTuple):
    """Requests that ran together, and the unix time at which all had ended."""

    end_s: float
    requests: tuple[CapturedRequest, ...]


class Capture(NamedTuple):
    """A complete capture: rounds in their order, frames in the order of publication."""

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
    frames = [CapturedFrame(time_s, decode_sequence(sequence), payload) for time_s, (_topic, sequence, payload) in wire]
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


class CapturedCaches:
    """The caches of all data-parallel ranks that a capture names; rank 0 is always there."""

    def __init__(self, capture: Capture) -> None:
        self._decoders = {publisher: BatchDecoder() for publisher in capture.publishers}
        self._batches = self._decoded(capture)
        named = {_rank(publisher, batch) for (publisher, _), batch in self._batches.items()}
        self.dp_ranks = tuple(sorted({0, *(rank for rank in named if 0 <= rank <= DP_RANK_MAX)}))
        self._mirrors = {dp_rank: RankMirror(capture.block_size) for dp_rank in self.dp_ranks}
        self._held: dict[int, dict[int, int]] = {dp_rank: {} for dp_rank in self.dp_ranks}
        self._expected = dict.fromkeys(capture.publishers, 0)

    def _decoded(self, capture: Capture) -> dict[tuple[int | None, int], EngineBatch]:
        """Return the decoded batches by publisher and sequence, without unreadable ones."""
        batches = {}
        for frame in capture.frames:
            with suppress(MalformedMessage):
                batch = self._decoders[frame.publisher].decode(frame.sequence, frame.payload)
                batches[frame.publisher, frame.sequence] = batch
        return batches

    @property
    def refused_events(self) -> int:
        """How many events the decoder refused."""
        return sum(decoder.counts["refused"] for decoder in self._decoders.values())

    def counts(self) -> list[Counter[str]]:
        """Return the counts of each rank's mirror so far: how it applied the events."""
        return [mirror.counts[ENGINE] for mirror in self._mirrors.values()]

    def held(self, dp_rank: int) -> dict[int, int]:
        """Return what a rank holds: sequence hash -> bit set of tiers."""
        return self._held[dp_rank]

    def overlap(self, sequence_hashes: Sequence[int]) -> int:
        """Return the longest prefix that some rank holds, in blocks, on any tiers."""
        blocks = len(sequence_hashes)
        return max(
            next((depth for depth in range(blocks) if sequence_hashes[depth] not in held), blocks)
            for held in self._held.values()
        )

    def steps(self, frame: CapturedFrame) -> Iterator[set[int]]:
        """Apply a frame; after each step that changed something, yield the sequence hashes that the step changed."""
        publisher = frame.publisher
        if frame.sequence > self._expected[publisher]:
            for dp_rank in self.dp_ranks if publisher is None else (publisher,):
                yield from self._at_once(dp_rank, self._mirrors[dp_rank].clear())
        self._expected[publisher] = frame.sequence + 1
        batch = self._batches.get((publisher, frame.sequence))
        if batch is None or (dp_rank := _rank(publisher, batch)) not in self._mirrors:
            return
        for engine_event in batch.events:
            changes = self._mirrors[dp_rank].apply(engine_event)
            if isinstance(engine_event, EngineCleared):
                yield from self._at_once(dp_rank, changes)
            else:
                yield from self._one_by_one(dp_rank, changes)

    def _at_once(self, dp_rank: int, changes: Iterable[Event]) -> Iterator[set[int]]:
        held, gone = self._held[dp_rank], set[int]()
        for change in changes:
            on_tier = [each for each, bits in held.items() if bits >> change.tier & 1]
            for sequence_hash in on_tier if isinstance(change, Cleared) else change.sequence_hashes:
                _put(held, sequence_hash, change.tier, is_there=False)
                gone.add(sequence_hash)
        if gone:
            yield gone

    def _one_by_one(self, dp_rank: int, changes: Iterable[Event]) -> Iterator[set[int]]:
        for change in changes:
            assert not isinstance(change, Cleared)
            for sequence_hash in change.sequence_hashes:
                _put(self._held[dp_rank], sequence_hash, change.tier, is_there=isinstance(change, Stored))
                yield {sequence_hash}


def _put(held: dict[int, int], sequence_hash: int, tier: Tier, *, is_there: bool) -> None:
    others = held.pop(sequence_hash, 0) & ~(1 << tier)
    if bits := others | is_there << tier:
        held[sequence_hash] = bits


def _rank(publisher: int | None, batch: EngineBatch) -> int:
    return (publisher or 0) if batch.dp_rank is None else batch.dp_rank


class CaptureFigures(msgspec.Struct):
    """What the check found; `requests` to `over` count requests, the other fields count blocks."""

    requests: int = 0
    exact: int = 0
    explained: int = 0
    under: int = 0
    over: int = 0
    missing_parent: int = 0
    duplicate: int = 0
    unknown_removal: int = 0


def checked(capture: Capture, caches: CapturedCaches) -> CaptureFigures:
    """Return the figures of a capture; `caches` have applied all of its frames afterwards."""
    figures, frames, size = CaptureFigures(), deque(capture.frames), capture.block_size
    with progress(len(capture.rounds)) as on_progress:
        for each in capture.rounds:
            prompts = [(sequence_hashes(one.prompt[:-1], size), one.cached) for one in each.requests]
            errors_tokens = [caches.overlap(hashes) * size - cached for hashes, cached in prompts]
            wrong = [prompt for prompt, error in zip(prompts, errors_tokens, strict=True) if error]
            figures.requests += len(prompts)
            figures.exact += len(prompts) - len(wrong)
            figures.under += sum(error < 0 for error in errors_tokens)
            figures.over += sum(error > 0 for error in errors_tokens)
            while frames and frames[0].time_s <= each.end_s:
                for changed in caches.steps(frames.popleft()):
                    wrong = [
                        (hashes, cached)
                        for hashes, cached in wrong
                        if changed.isdisjoint(hashes) or caches.overlap(hashes) * size != cached
                    ]
            figures.explained += len(prompts) - len(wrong)
            on_progress("rounds")
    for frame in frames:
        deque(caches.steps(frame), maxlen=0)
    for counts in caches.counts():
        figures.missing_parent += counts["unknown_parent"]
        figures.duplicate += counts["duplicate"]
        figures.unknown_removal += counts["unknown_removal"]
    return figures


@click.command("check-capture")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--json", "as_json", is_flag=True, help="print a JSON object of the figures from requests to unknown_removal"
)
def check_capture(*, file: Path, as_json: bool) -> None:
    """Compare what a recording of a real engine's KV events predicts with what the engine reused.

    FILE is a capture: msgpack, plain or gzip, with block_size, frames and requests. The check predicts for each round
    of requests from the events that were recorded up to the end of the round before. It applies events as a worker's
    agent does.

    \b
    exact            requests for which the check predicted as many cached prompt tokens as the engine
                     reused (the engine always computes the last token of a prompt)
    explained        exact requests, and requests for which the prediction became equal to the reuse
                     when the events of their own round were applied one block at a time
    under, over      requests that are not exact: fewer or more tokens were predicted
    missing_parent   stored blocks with an unknown parent
    duplicate        blocks stored again under the same engine hash, on the same tier and for the
                     same attention group
    unknown_removal  removed blocks that were not held
    refused          events that the decoder refused
    unfit            blocks of another size, or of bigrams
    unknown_name     blocks that an event stores without tokens, and that no earlier event described;
                     and those that come after a parent that is not held any more

    The exit code is 0 when the capture was read through, whatever the figures; 2 when FILE is no capture.
    """  # noqa: D301 - click needs the backspace character, which a raw docstring would not have
    try:
        capture = load_capture(file)
    except CaptureUnreadable as error:
        click.echo(f"indexer: {error}", err=True)
        sys.exit(2)
    caches = CapturedCaches(capture)
    figures = checked(capture, caches)
    if as_json:
        click.echo(msgspec.json.encode(figures))
        return
    others = Counter[str]()
    for counts in caches.counts():
        others.update({"unfit": counts["unfit"], "unknown_name": counts["unknown_name"]})
    shown = {
        "block_size": capture.block_size,
        "frames": len(capture.frames),
        "rounds": len(capture.rounds),
        **msgspec.structs.asdict(figures),
        "refused": caches.refused_events,
        **others,
    }
    rows = [(name, f"{value:,}") for name, value in shown.items()]
    Console().print(rich_table(FigureTable(f"{file.name}: predicted and reused", ("", ""), rows)))
