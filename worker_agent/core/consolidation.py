"""All ranks of one worker: hop A payloads in, numbered canonical streams out, with proof and recovery.

* Every readable event goes to its rank's mirror; what it changed goes to its rank's outbox.
* Blocks of a wrong size are counted and dropped, and make their rank stale.
* An unreadable event is counted, makes its rank stale and costs nothing else; an unreadable batch, every rank.
* When payloads are lost for good, nobody knows what the ranks hold: mirrors are emptied and new epochs begin, so that
  readers forget too. Undercounting is safe: what is not counted on is not missed.
* A rank is stale no more when it is known to be empty, but for a clear in a batch that had something unreadable too.
"""

from collections.abc import Callable
from copy import copy

import msgspec

from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import Heartbeat
from kv_protocol.recovery import DumpChunk, dump_chunks
from worker_agent.core.dialects.hop_a import decode_payload
from worker_agent.core.engine_events import EngineBatch, EngineCleared, EngineStored
from worker_agent.core.mirror import MirrorCounts, RankMirror
from worker_agent.core.outbox import Outbox


class RankStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's stream and mirror."""

    epoch: int
    last_seq: int
    waiting_bytes: int
    dropped_batches_total: int
    held_blocks: int
    counts: dict[str, MirrorCounts]
    """By source."""


class ConsolidationStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks, and what could not be read."""

    ranks: dict[int, RankStatistics]
    refused_events_total: int
    refused_batches_total: int
    unknown_rank_batches_total: int
    losses_total: int


class Consolidation:
    """The ranks' mirrors and outboxes. `draw_epoch` gives a random u64 for each new life of a stream."""

    def __init__(
        self,
        dp_ranks: tuple[int, ...],
        block_size: int,
        instance: str,
        draw_epoch: Callable[[], int],
        *,
        outbox_bytes_max: int = 64 << 20,
    ) -> None:
        self._instance = instance
        self._new_outbox: Callable[[], Outbox] = lambda: Outbox(draw_epoch(), bytes_max=outbox_bytes_max)
        self._stale = dict.fromkeys(dp_ranks, "")
        self._mirrors = {dp_rank: RankMirror(block_size) for dp_rank in dp_ranks}
        self._outboxes = {dp_rank: self._new_outbox() for dp_rank in dp_ranks}
        self._refused_events = self._refused_batches = self._unknown_rank = self._losses = 0
        self._dropped_before = dict.fromkeys(dp_ranks, 0)

    @property
    def dp_ranks(self) -> tuple[int, ...]:
        """The ranks that have a stream."""
        return tuple(self._mirrors)

    def outbox(self, dp_rank: int) -> Outbox:
        """Return the rank's present stream."""
        return self._outboxes[dp_rank]

    def on_payload(self, sequence: int, payload: bytes) -> set[int]:
        """Fold one hop A payload in; return the ranks whose outbox has something new."""
        try:
            batch = decode_payload(sequence, payload)
        except MalformedMessage as error:
            self._refused_batches += 1
            self._stale = dict.fromkeys(self._stale, f"unreadable batch: {error}")
            return set()
        dp_rank = batch.dp_rank or 0
        if dp_rank not in self._mirrors:
            self._unknown_rank += 1
            return set()
        changed = self._apply(dp_rank, batch)
        if batch.refused:
            self._refused_events += len(batch.refused)
            self._stale[dp_rank] = f"unreadable event: {batch.refused[0]}"
        return changed

    def _apply(self, dp_rank: int, batch: EngineBatch) -> set[int]:
        mirror, outbox = self._mirrors[dp_rank], self._outboxes[dp_rank]
        before = outbox.last_seq
        for engine_event in batch.events:
            if isinstance(engine_event, EngineCleared):
                self._stale[dp_rank] = ""
            elif isinstance(engine_event, EngineStored) and (reason := mirror.unfit(engine_event)):
                self._stale[dp_rank] = reason
            for event in mirror.apply(engine_event):
                outbox.add(event, source_seq=batch.sequence, engine_time_ns=round(batch.time_s * 1e9))
        return {dp_rank} if outbox.last_seq > before else set()

    def on_loss(self) -> None:
        """Payloads are lost for good: begin anew, empty, in a new epoch."""
        self._losses += 1
        for dp_rank, mirror in self._mirrors.items():
            mirror.clear()
            self._stale[dp_rank] = ""
            self._dropped_before[dp_rank] += self._outboxes[dp_rank].dropped_batches_total
            self._outboxes[dp_rank] = self._new_outbox()

    def heartbeat(self, dp_rank: int, source_stale: str = "") -> Heartbeat:
        """Return the rank's pulse: its place and the proof of its set there, and why its source may be wrong."""
        outbox = self._outboxes[dp_rank]
        return Heartbeat(
            instance=self._instance,
            epoch=outbox.epoch,
            last_seq=outbox.last_seq,
            tiers=self._mirrors[dp_rank].digests(),
            stale=self._stale[dp_rank] or source_stale,
        )

    def dump(self, dp_rank: int, request_id: int) -> list[DumpChunk]:
        """Return the rank's whole state, as of its last seq."""
        outbox = self._outboxes[dp_rank]
        return dump_chunks(request_id, outbox.epoch, outbox.last_seq, self._mirrors[dp_rank].dump())

    def statistics(self) -> ConsolidationStatistics:
        """Return the figures that metrics and people read."""
        return ConsolidationStatistics(
            ranks={dp_rank: self._rank_statistics(dp_rank) for dp_rank in self._mirrors},
            refused_events_total=self._refused_events,
            refused_batches_total=self._refused_batches,
            unknown_rank_batches_total=self._unknown_rank,
            losses_total=self._losses,
        )

    def _rank_statistics(self, dp_rank: int) -> RankStatistics:
        mirror, outbox = self._mirrors[dp_rank], self._outboxes[dp_rank]
        return RankStatistics(
            epoch=outbox.epoch,
            last_seq=outbox.last_seq,
            waiting_bytes=outbox.waiting_bytes,
            dropped_batches_total=self._dropped_before[dp_rank] + outbox.dropped_batches_total,
            held_blocks=sum(digest.block_count for digest in mirror.digests()),
            counts={source: copy(counts) for source, counts in mirror.counts.items()},
        )
