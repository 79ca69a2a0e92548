"""What an agent makes of a capture's frames, block by block, to see what was true in the middle of a round.

An engine decides what a request reuses while others of its round store and evict. Decoder and mirror are an agent's;
their changes are applied one block at a time, and so pass through every state in between:

    n blocks stored by one event     n steps
    n blocks removed by one event    n steps
    a clear, a loss of frames        one step

At the end of each frame the caches are what an index holds that follows the agent.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from bench.capture.capture import Capture, CapturedFrame
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import Cleared, Event, Stored, Tier
from kv_protocol.ids import DP_RANK_MAX
from worker_agent.events.dialects.batches import BatchDecoder
from worker_agent.events.engine_events import EngineBatch, EngineCleared
from worker_agent.events.mirror import ENGINE, MirrorCounts, RankMirror


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
        """How many events could not be read."""
        return sum(decoder.counts.refused for decoder in self._decoders.values())

    def counts(self) -> list[MirrorCounts]:
        """Return what the mirror of each rank made of its events so far."""
        return [mirror.counts[ENGINE] for mirror in self._mirrors.values()]

    def held(self, dp_rank: int) -> dict[int, int]:
        """Return what a rank holds: sequence hash -> bit set of tiers."""
        return self._held[dp_rank]

    def overlap(self, sequence_hashes: Sequence[int]) -> int:
        """Return the longest prefix that some rank holds, in blocks, on any tiers."""
        return max(_prefix(sequence_hashes, held) for held in self._held.values())

    def steps(self, frame: CapturedFrame) -> Iterator[set[int]]:
        """Apply a frame; after each step that changed something, yield the sequence hashes that it concerned."""
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


def _prefix(sequence_hashes: Sequence[int], held: dict[int, int]) -> int:
    return next((depth for depth, each in enumerate(sequence_hashes) if each not in held), len(sequence_hashes))
