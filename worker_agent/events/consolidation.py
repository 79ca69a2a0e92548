"""Turns publishers' payloads into one numbered canonical stream for each rank of a worker, with digests and recovery.

A publisher reports for one source (the engine, a host tier's owner, ...) and for one rank, or for all ranks.

    readable event                     applied to its rank's mirror for its source; the changes go to the rank's outbox
    event that the mirror refuses      counted and dropped; the source is stale at that rank (`RankMirror.unfit`)
    unreadable event                   counted; the source is stale at that rank; the rest of its batch is applied
    unreadable batch                   counted; the source is stale at every rank of its publisher
    batch of a rank that is not its    counted and dropped; if the publisher has one rank, the source is stale there
      publisher's, or not the worker's
    payloads lost for good             the source's blocks at the publisher's ranks are removed, until reported again
    clear                              the source's blocks at that rank are removed

A loss or clear keeps the blocks of other sources. The removals are events of the same epoch, so readers need only the
stream; an epoch lasts as long as this object. A block wrongly missing here is at worst computed again. A loss or clear
ends a source's staleness, unless the batch of the clear also had an unreadable event. `recoveries.py` answers readers
that lost their place or doubt their state.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kv_protocol.errors import MalformedMessage
from kv_protocol.events import Event
from kv_protocol.fleet import Heartbeat
from kv_protocol.recovery import Answer, RecoverRequest
from worker_agent.events import recoveries
from worker_agent.events.dialects.batches import BatchDecoder, count
from worker_agent.events.engine_events import EngineBatch, EngineCleared, EngineStored
from worker_agent.events.mirror import ENGINE, RankMirror
from worker_agent.events.outbox import RING_BYTES_MAX, Outbox
from worker_agent.events.quarantine import NEWEST_MAX, PROBLEM_CHARACTERS_MAX

_STALE_CHARACTERS_MAX = 1000
"""Bound of the reason in a heartbeat: it may quote values that an engine sent."""


class Origin(NamedTuple):
    """The source of a publisher and its rank; `dp_rank` None: each batch names its rank.

    If the worker has one rank, the batches may name any rank, but all the same one: with external load balancing an
    engine names its place in the group. Source: vLLM `vllm/v1/engine/core.py` (`data_parallel_rank` of `KVEventBatch`).
    """

    source: str = ENGINE
    dp_rank: int | None = None

    def __str__(self) -> str:
        return self.source if self.dp_rank is None else f"{self.source}-{self.dp_rank}"


SOLE = Origin()
"""The engine's publisher for all ranks: the default, if a worker has no other."""


class PublisherState:
    """The state of one publisher, and the counts of its payloads; they never decrease."""

    def __init__(self) -> None:
        self.decoder = BatchDecoder()
        self.refused_batches_total = self.foreign_rank_batches_total = self.losses_total = 0
        self.refused = deque[str](maxlen=NEWEST_MAX)
        """Reasons of the newest unreadable batches and events, cut short, oldest first, for operators."""
        self.named_rank: int | None = None
        """On a worker with one rank: the rank that this publisher's batches name; None: none has come."""


class Consolidation:
    """The ranks' mirrors and outboxes. `draw_epoch` gives each stream a random u64 other than 0."""

    chunk_blocks = recoveries.CHUNK_BLOCKS
    """Blocks in a part of an answer to a recovery request."""

    def __init__(
        self,
        dp_ranks: tuple[int, ...],
        block_size: int,
        instance: str,
        draw_epoch: Callable[[], int],
        *,
        origins: Sequence[Origin] = (SOLE,),
        is_eagle: bool = False,
        ring_bytes_max: int = RING_BYTES_MAX,
    ) -> None:
        self._instance = instance
        self.dp_ranks = dp_ranks
        """The ranks that have a stream."""
        self.mirrors = {dp_rank: RankMirror(block_size, is_eagle=is_eagle) for dp_rank in dp_ranks}
        self.outboxes = {dp_rank: Outbox(draw_epoch(), ring_bytes_max=ring_bytes_max) for dp_rank in dp_ranks}
        self.publishers: Mapping[Origin, PublisherState] = {origin: PublisherState() for origin in origins}
        """The states of all publishers, for metrics and operators."""
        self._stale: dict[tuple[int, str], str] = {}

    def ranks_of(self, origin: Origin) -> tuple[int, ...]:
        """Return the ranks of a publisher."""
        return self.dp_ranks if origin.dp_rank is None else (origin.dp_rank,)

    def on_payload(self, sequence: int, payload: bytes, origin: Origin = SOLE) -> set[int]:
        """Apply one engine event payload; return the ranks whose outbox has new batches."""
        publisher = self.publishers[origin]
        try:
            batch = publisher.decoder.decode(sequence, payload)
        except MalformedMessage as error:
            publisher.refused_batches_total += 1
            publisher.refused.append(str(error)[:PROBLEM_CHARACTERS_MAX])
            self._doubt(origin, f"unreadable batch: {error}")
            return set()
        return self._on_decoded(batch, origin)

    def on_batch(self, batch: EngineBatch, origin: Origin = SOLE) -> set[int]:
        """Apply a batch of a source that this process polls; return the ranks whose outbox has new batches."""
        for event in batch.events:
            count(event, self.publishers[origin].decoder.counts)
        return self._on_decoded(batch, origin)

    def _on_decoded(self, batch: EngineBatch, origin: Origin) -> set[int]:
        publisher = self.publishers[origin]
        dp_rank = self._rank_of(batch, origin)
        if dp_rank is None:
            publisher.foreign_rank_batches_total += 1
            return set()
        changed = self._apply(dp_rank, origin.source, batch)
        if batch.refused:
            publisher.refused.extend(reason[:PROBLEM_CHARACTERS_MAX] for reason in batch.refused[-NEWEST_MAX:])
            self._stale[dp_rank, origin.source] = f"unreadable event: {batch.refused[0]}"
        return changed

    def _rank_of(self, batch: EngineBatch, origin: Origin) -> int | None:
        """Return the worker's rank to which a batch belongs; None if it is not the publisher's.

        If the publisher has one rank, a batch of another rank makes its source stale there.
        """
        found = (origin.dp_rank or 0) if batch.dp_rank is None else batch.dp_rank
        allowed = self.ranks_of(origin)
        if origin.dp_rank is None and len(allowed) == 1:
            publisher = self.publishers[origin]
            publisher.named_rank = found if publisher.named_rank is None else publisher.named_rank
            if found == publisher.named_rank:
                return allowed[0]
            self._doubt(origin, f"dp_rank: found {found} beside {publisher.named_rank}, allowed one rank")
        elif found in allowed:
            return found
        elif origin.dp_rank is not None:
            self._doubt(origin, f"dp_rank: found {found}, allowed {origin.dp_rank}")
        return None

    def _apply(self, dp_rank: int, source: str, batch: EngineBatch) -> set[int]:
        mirror, changed = self.mirrors[dp_rank], set[int]()
        for engine_event in batch.events:
            if isinstance(engine_event, EngineCleared):
                self._stale.pop((dp_rank, source), None)
            elif isinstance(engine_event, EngineStored) and (reason := mirror.unfit(engine_event)):
                self._stale[dp_rank, source] = reason
            events = mirror.apply(engine_event, source)
            changed |= self._enqueue(dp_rank, events, batch.sequence, round(batch.time_s * 1e9))
        return changed

    def on_loss(self, origin: Origin = SOLE, *, began_anew: bool = False) -> set[int]:
        """Remove the source's blocks at the publisher's ranks, because payloads are lost for good.

        Return the ranks whose outbox has new batches. `began_anew`: the publisher restarted.
        """
        publisher, changed = self.publishers[origin], set[int]()
        publisher.losses_total += 1
        if began_anew:
            publisher.decoder.forget()
            publisher.named_rank = None
        for dp_rank in self.ranks_of(origin):
            self._stale.pop((dp_rank, origin.source), None)
            changed |= self._enqueue(dp_rank, self.mirrors[dp_rank].clear(origin.source), 0, 0)
        return changed

    def _enqueue(self, dp_rank: int, events: Iterable[Event], source_seq: int, engine_time_ns: int) -> set[int]:
        outbox = self.outboxes[dp_rank]
        before = outbox.last_seq
        for event in events:
            outbox.add(event, source_seq=source_seq, engine_time_ns=engine_time_ns)
        return {dp_rank} if outbox.last_seq > before else set()

    def _doubt(self, origin: Origin, reason: str) -> None:
        for dp_rank in self.ranks_of(origin):
            self._stale[dp_rank, origin.source] = reason

    def stale(self, dp_rank: int) -> str:
        """Return why the rank's blocks may be wrong, source by source; empty if no reason is known."""
        return "; ".join(
            f"{source}: {reason}" for (rank, source), reason in sorted(self._stale.items()) if rank == dp_rank
        )

    def heartbeat(self, dp_rank: int, source_stale: str = "") -> Heartbeat:
        """Return the rank's heartbeat. `source_stale`: why it is stale, if this object knows no reason."""
        outbox = self.outboxes[dp_rank]
        outbox.end_message_here()
        return Heartbeat(
            instance=self._instance,
            epoch=outbox.epoch,
            last_seq=outbox.last_seq,
            tiers=self.mirrors[dp_rank].digests(),
            stale=(self.stale(dp_rank) or source_stale)[:_STALE_CHARACTERS_MAX],
        )

    def recover(self, dp_rank: int, request: RecoverRequest) -> Iterator[Answer]:
        """Return the parts (at least one) of the answer to a recovery request, up to the rank's present last seq."""
        return recoveries.answer(request, self.outboxes[dp_rank], self.mirrors[dp_rank], self.chunk_blocks)
