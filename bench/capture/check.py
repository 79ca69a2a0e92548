"""`indexer check-capture`: did the index predict what the engine reused for each request?

For each round, in order:

    1  every frame recorded up to the end of the round before is played; wait until the index has applied it
    2  predict for each request: the longest prefix of its prompt, without the last token, that the index holds
       (full blocks, all tiers; of several data-parallel ranks the one that holds most, as captures name none)
    3  exact      the prediction is what the engine took from its cache
       explained  it is, or it would have been between two block changes in the midst of the request's own round
       under      not exact, less was predicted; over: more was

An engine decides in the middle of a round, from a state that is not known before: `explained` covers that. It comes
from a twin of the pipe that goes block by block; at every barrier the index holds what the twin holds, or the check
fails. The last token is never reused: an engine has to compute something.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, takewhile

import msgspec
from rich.console import Console
from rich.table import Table

from bench.capture.capture import Capture, CapturedFrame, CapturedRequest
from bench.capture.pipe import CheckFailed, Pipe, through_pipe
from bench.capture.publisher import CapturePublisher, Chaos, Fate
from bench.capture.twin import Twin
from bench.tables import progress
from kv_protocol.hashing import sequence_hashes


class CheckStopped(CheckFailed):
    """The check was stopped."""


class CaptureFigures(msgspec.Struct):
    """What the check found; the first five count requests, the others blocks."""

    requests: int = 0
    exact: int = 0
    explained: int = 0
    under: int = 0
    over: int = 0
    missing_parent: int = 0
    duplicate: int = 0
    unknown_removal: int = 0


class ChaosFigures(msgspec.Struct, frozen=True):
    """Faults of frames on the live socket, and the number of replay requests (depends on timing)."""

    seed: int
    dropped: int
    duplicated: int
    reordered: int
    replays: int


class LeftOut(msgspec.Struct, frozen=True):
    """What could not be used: events that could not be read, and blocks of others."""

    refused_events: int
    unfit_blocks: int
    unknown_names: int


class Report(msgspec.Struct, frozen=True):
    """A finished check of one capture."""

    capture: Capture
    figures: CaptureFigures
    left_out: LeftOut
    chaos: ChaosFigures | None = None

    def json(self) -> bytes:
        """Return the figures as one JSON object."""
        fields = msgspec.structs.asdict(self.figures)
        return msgspec.json.encode(fields if self.chaos is None else {**fields, "chaos": self.chaos})


async def check_capture(
    capture: Capture, stop: asyncio.Event, *, chaos_seed: int | None = None, on_round: Callable[[], None]
) -> Report | None:
    """Return the report of a capture, or None where `stop` was set before; `on_round` is called after each round.

    Raises as `through_pipe` does.
    """
    twin = Twin(capture)
    chaos = None if chaos_seed is None else Chaos(chaos_seed)
    check = _Check(capture, twin, on_round)
    done = await through_pipe(check.run, stop, capture, twin.dp_ranks, chaos)
    if done is None:
        return None
    (figures, left_out), publishers = done
    return Report(capture, figures, left_out, None if chaos is None else _chaos_figures(chaos, publishers))


def _chaos_figures(chaos: Chaos, publishers: list[CapturePublisher]) -> ChaosFigures:
    fates = sum((Counter(publisher.fates) for publisher in publishers), Counter[Fate]())
    replays = sum(publisher.replays_total for publisher in publishers)
    return ChaosFigures(chaos.seed, fates[Fate.DROPPED], fates[Fate.DUPLICATED], fates[Fate.REORDERED], replays)


class _CheckedRequest:
    """One request, and what was predicted for it."""

    def __init__(self, request: CapturedRequest, block_size: int, overlap: Callable[[list[int]], int]) -> None:
        self._hashes = sequence_hashes(request.prompt[:-1], block_size)
        self._members = set(self._hashes)
        self._block_size = block_size
        self._cached = request.cached
        self.error_tokens = overlap(self._hashes) * block_size - request.cached

    def explained_by(self, changed: set[int], overlap: Callable[[list[int]], int]) -> bool:
        """Return whether the overlap is what was reused, now that `changed` blocks came or went."""
        return not self._members.isdisjoint(changed) and overlap(self._hashes) * self._block_size == self._cached


class _Check:
    """One capture on its way through one pipe."""

    def __init__(self, capture: Capture, twin: Twin, on_round: Callable[[], None]) -> None:
        self._capture, self._twin, self._on_round = capture, twin, on_round
        self._at = 0
        self._figures = CaptureFigures()

    async def run(self, pipe: Pipe) -> tuple[CaptureFigures, LeftOut]:
        """Play all rounds, then what was recorded after the last one."""
        await pipe.connected()
        for each in self._capture.rounds:
            predictions = [
                _CheckedRequest(request, self._capture.block_size, pipe.overlap) for request in each.requests
            ]
            self._count(predictions)
            played = self._frames_until(each.end_s)
            self._figures.explained += self._explain(predictions, played)
            await self._deliver(pipe, played)
            self._on_round()
        rest = list(self._capture.frames[self._at :])
        self._explain([], rest)
        await self._deliver(pipe, rest)
        counts = pipe.mirror_counts()
        self._figures.missing_parent = sum(each.unknown_parent for each in counts)
        self._figures.duplicate = sum(each.duplicate for each in counts)
        self._figures.unknown_removal = sum(each.unknown_removal for each in counts)
        unfit, unknown = sum(each.unfit for each in counts), sum(each.unknown_name for each in counts)
        return self._figures, LeftOut(pipe.refused_events, unfit, unknown)

    def _count(self, predictions: list[_CheckedRequest]) -> None:
        figures = self._figures
        figures.requests += len(predictions)
        figures.exact += sum(each.error_tokens == 0 for each in predictions)
        figures.under += sum(each.error_tokens < 0 for each in predictions)
        figures.over += sum(each.error_tokens > 0 for each in predictions)

    def _frames_until(self, end_s: float) -> list[CapturedFrame]:
        frames = self._capture.frames
        played = list(takewhile(lambda frame: frame.time_s <= end_s, islice(frames, self._at, None)))
        self._at += len(played)
        return played

    def _explain(self, predictions: list[_CheckedRequest], frames: list[CapturedFrame]) -> int:
        """Let the twin go through `frames`; return how many predictions were right before or on the way."""
        wrong = [each for each in predictions if each.error_tokens]
        for frame in frames:
            for changed in self._twin.steps(frame):
                wrong = [each for each in wrong if not each.explained_by(changed, self._twin.overlap)]
        return len(predictions) - len(wrong)

    async def _deliver(self, pipe: Pipe, frames: list[CapturedFrame]) -> None:
        await pipe.deliver(frames)
        for dp_rank in self._twin.dp_ranks:
            await pipe.agree(dp_rank, self._twin.held(dp_rank))


async def print_check(
    capture: Capture, name: str, stop: asyncio.Event, *, as_json: bool, chaos_seed: int | None
) -> None:
    """Check a capture; print its figures, and how far the check is to a terminal on standard error."""
    with progress(len(capture.rounds)) as on_progress:
        report = await check_capture(capture, stop, chaos_seed=chaos_seed, on_round=lambda: on_progress("rounds"))
    if report is None:
        raise CheckStopped("stopped before the end of the capture")
    if as_json:
        print(report.json().decode())
    else:
        Console().print(table(report, name))


def table(report: Report, file: str) -> Table:
    """Return the report as text."""
    shown = Table(title=f"{file}: predicted and reused")
    shown.add_column("")
    shown.add_column("", justify="right")
    shown.add_column("which means", overflow="fold")
    for name, value, meaning in _rows(report):
        shown.add_row(name, f"{value:,}", meaning)
    return shown


def _rows(report: Report) -> Iterator[tuple[str, int, str]]:
    capture, figures = report.capture, report.figures
    yield "block size", capture.block_size, "tokens that are cached together"
    yield "frames", len(capture.frames), "messages of the engine's publisher"
    yield "rounds", len(capture.rounds), "of requests that ran together"
    yield "requests", figures.requests, ""
    yield "exact", figures.exact, "predicted before the round what the engine reused"
    yield "explained", figures.explained, "exact, or right at some moment within the round"
    yield "under", figures.under, "not exact: less predicted than reused"
    yield "over", figures.over, "not exact: more predicted than reused"
    yield "missing parent", figures.missing_parent, "blocks stored behind an unknown block"
    yield "duplicate", figures.duplicate, "blocks stored again while they were there"
    yield "unknown removal", figures.unknown_removal, "blocks removed that were not there"
    yield "refused", report.left_out.refused_events, "events that could not be read"
    yield "unfit", report.left_out.unfit_blocks, "blocks of another size, or of bigrams"
    yield "unknown name", report.left_out.unknown_names, "moved blocks that were not described before"
    if report.chaos is not None:
        yield "chaos: dropped", report.chaos.dropped, f"frames not sent; seed {report.chaos.seed}"
        yield "chaos: duplicated", report.chaos.duplicated, "frames sent twice"
        yield "chaos: reordered", report.chaos.reordered, "frames sent behind the one after them"
        yield "chaos: replays", report.chaos.replays, "questions for frames that did not come"
