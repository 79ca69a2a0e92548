"""The simulation itself is tested: each of these bugs must make it fail."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import pytest

from indexer.core.facts import Question
from indexer.core.fold import IndexFold
from indexer.core.follower import ApplyEvent, Effect, Phase, StreamFollower
from indexer.core.reference import ReferenceIndex
from kv_protocol.digest import TierDigest
from kv_protocol.events import Batch, Event, Tier
from kv_protocol.fleet import Heartbeat
from kv_protocol.recovery import BlockColumns, DumpChunk, dump_chunks
from tests.simulation.setup import Kind
from tests.simulation.test_convergence import SEEDS, assert_calm
from tests.simulation.world import World
from worker_agent.core.consolidation import SOLE, Consolidation, Origin
from worker_agent.core.dialects.trtllm import TrtllmRules
from worker_agent.core.dialects.trtllm_wire import Head
from worker_agent.core.engine_events import EngineStored
from worker_agent.core.mirror import RankMirror
from worker_agent.core.outbox import Outbox
from worker_agent.core.source_cursor import Delivery, SourceCursor, _Question


class AppliesOverGaps(StreamFollower):
    """Takes the next batch that comes for the next one."""

    def on_batch(self, batch: Batch, now_s: float) -> list[Effect]:
        if self._phase is Phase.LIVE and batch.epoch == self._epoch and batch.seq > self._cursor:
            return [self._step(batch)]
        return super().on_batch(batch, now_s)


class AppliesTwice(StreamFollower):
    """Forgets what it has applied."""

    def on_batch(self, batch: Batch, now_s: float) -> list[Effect]:
        if self._phase is Phase.LIVE and batch.epoch == self._epoch and batch.seq <= self._cursor:
            return [ApplyEvent(batch.event)]
        return super().on_batch(batch, now_s)


class KeepsBlocksOverEpochs(StreamFollower):
    """Merges a new epoch with the old one."""

    def _adopt(self, epoch: int) -> list[Effect]:
        super()._adopt(epoch)
        return []


class MixesAnswers(StreamFollower):
    """Puts chunks of answers to old questions together with those of the newest."""

    def on_chunk(self, chunk: DumpChunk, now_s: float) -> list[Effect]:
        first = next(iter(self._chunks.values()), chunk)
        if chunk.chunk >= first.of:
            return []
        as_if = {"request_id": self._request_id, "epoch": first.epoch, "last_seq": first.last_seq, "of": first.of}
        return super().on_chunk(msgspec.structs.replace(chunk, **as_if), now_s)

    def _ask(self, now_s: float) -> list[Effect]:
        chunks = dict(self._chunks)
        effects = super()._ask(now_s)
        self._chunks.update(chunks)
        return effects


class NeverAsksAgain(StreamFollower):
    """Waits for an answer for ever."""

    def tick(self, now_s: float) -> list[Effect]:
        return [] if self._phase is Phase.RESYNCING else super().tick(now_s)


class NeverMissesTheLast(StreamFollower):
    """Takes a batch for lost only when a later one comes."""

    def tick(self, now_s: float) -> list[Effect]:
        return super().tick(now_s) if self._phase is Phase.RESYNCING else []


class RetiresForEver(StreamFollower):
    """Lets the late last heartbeat of a dead epoch end the living one."""

    def on_heartbeat(self, heartbeat: Heartbeat, digest_of: Callable[[Tier], TierDigest], now_s: float) -> list[Effect]:
        return [] if heartbeat.epoch in self._retired else super().on_heartbeat(heartbeat, digest_of, now_s)


class BelievesAnyDigest(StreamFollower):
    """Compares nothing."""

    @staticmethod
    def _differs(heartbeat: Heartbeat, digest_of: Callable[[Tier], TierDigest]) -> bool:
        return heartbeat.epoch < 0 and digest_of(Tier.GPU).block_count < 0


class NeverMissesAnybody(IndexFold):
    """Takes silence for life."""

    def tick(self, now_s: float) -> list[Question]:
        for state in self._ranks.values():
            state.heard_at_s = now_s
        return super().tick(now_s)


class IgnoresHostRemovals(ReferenceIndex):
    """Keeps blocks of one tier."""

    def _remove(self, rank: int, hashes: Sequence[int], tier: Tier) -> None:
        if tier is not Tier.HOST:
            super()._remove(rank, hashes, tier)


class LoadsOnTop(ReferenceIndex):
    """Adds a dump to what it holds."""

    def load(self, rank: int, chunks: Iterable[BlockColumns], now_s: float) -> None:
        for block in (block for columns in chunks for block in columns.blocks()):
            self._attach(rank, block.parent, block.sequence_hash, block.tier_bits, now_s)


class DumpsOneSeqAhead(Consolidation):
    """Says that a dump covers a batch which it does not."""

    def dump(self, dp_rank: int, request_id: int) -> list[DumpChunk]:
        chunks = super().dump(dp_rank, request_id)
        return [msgspec.structs.replace(chunk, last_seq=chunk.last_seq + 1) for chunk in chunks]


class DumpsAllButOne(Consolidation):
    """Leaves a block out."""

    def dump(self, dp_rank: int, request_id: int) -> list[DumpChunk]:
        (dump,) = super().dump(dp_rank, request_id)
        return dump_chunks(request_id, dump.epoch, dump.last_seq, list(dump.blocks())[:-1])


class DumpsTheDead(Consolidation):
    """Keeps in a dump what was in an earlier one."""

    def dump(self, dp_rank: int, request_id: int) -> list[DumpChunk]:
        (dump,) = super().dump(dp_rank, request_id)
        dumped = self.__dict__.setdefault("dumped", {})
        dumped.update({block.sequence_hash: block for block in dump.blocks()})
        return dump_chunks(request_id, dump.epoch, dump.last_seq, dumped.values())


class ForgetsInSilence(Consolidation):
    """Forgets after a loss, and does not say so."""

    def on_loss(self, origin: Origin = SOLE, *, began_anew: bool = False) -> set[int]:
        outboxes = dict(self._outboxes)
        self._outboxes = {dp_rank: Outbox(0) for dp_rank in outboxes}
        changed = super().on_loss(origin, began_anew=began_anew)
        self._outboxes = outboxes
        return changed


class ForgetsNothing(Consolidation):
    """Believes after a loss what it believed before."""

    def on_loss(self, origin: Origin = SOLE, *, began_anew: bool = False) -> set[int]:  # noqa: ARG002
        return set()


class RemovesWithTheFirstAlias(RankMirror):
    """Takes one of several equal engine blocks for the last."""

    def _let_go(self, sequence_hash: int, tier: Tier) -> bool:
        self._blocks[sequence_hash].usable[tier] = 1
        return super()._let_go(sequence_hash, tier)


class RootsOrphans(RankMirror):
    """Takes a block of an unknown parent for the first of a sequence."""

    def _store(self, event: EngineStored, source: str) -> list[Event]:
        if event.parent_block_hash is not None and self._known(event.parent_block_hash, source) is None:
            event = msgspec.structs.replace(event, parent_block_hash=None)
        return super()._store(event, source)


class SkipsANumber(Outbox):
    """Leaves a hole in the seqs."""

    def add(self, event: Event, *, source_seq: int, engine_time_ns: int) -> None:
        self.last_seq += self.last_seq == 7
        super().add(event, source_seq=source_seq, engine_time_ns=engine_time_ns)


class LosesAnEvent(Outbox):
    """Gives an event no seq at all."""

    def add(self, event: Event, *, source_seq: int, engine_time_ns: int) -> None:
        if self.last_seq != 7 or self.__dict__.setdefault("lost", event) is not event:
            super().add(event, source_seq=source_seq, engine_time_ns=engine_time_ns)


class JumpsHoles(SourceCursor):
    """Reads on behind a hole."""

    def on_live(self, sequence: int, payload: bytes, now_s: float) -> Delivery:
        self._expected = max(self._expected, sequence)
        return super().on_live(sequence, payload, now_s)


class GivesUpYoungHoles(SourceCursor):
    """Takes for lost what was published after the replay was asked for."""

    def on_replay_end(self, now_s: float) -> Delivery:
        self._brought = max([self._brought, *self._kept])
        return super().on_replay_end(now_s)


class NeverGivesUp(SourceCursor):
    """Asks for ever for what is lost for good."""

    def on_replay_end(self, now_s: float) -> Delivery:
        self._question, self._brought = _Question(-1, in_doubt=False), -1
        return super().on_replay_end(now_s)


class WaitsForEver(SourceCursor):
    """Never asks again where an answer was lost."""

    def on_no_answer(self) -> Delivery:
        return Delivery()


class IgnoresIdJumps(TrtllmRules):
    """Goes on after the engine's buffer overflowed."""

    def _continues(self, head: Head) -> bool:
        return super()._continues(head) or True


FOLLOWER = "indexer.core.fold.StreamFollower"
FOLD = "tests.simulation.index.IndexFold"
TREE = "tests.simulation.index.ReferenceIndex"
CONSOLIDATION = "tests.simulation.agent.Consolidation"
MIRROR = "worker_agent.core.consolidation.RankMirror"
OUTBOX = "worker_agent.core.consolidation.Outbox"
CURSOR = "tests.simulation.agent.SourceCursor"
RULES = "tests.simulation.engine.TrtllmRules"

PLANTED: Sequence[tuple[str, type, Kind]] = (
    (FOLLOWER, AppliesOverGaps, "faulty"),
    (FOLLOWER, AppliesTwice, "faulty"),
    (FOLLOWER, KeepsBlocksOverEpochs, "faulty"),
    (FOLLOWER, MixesAnswers, "faulty"),
    (FOLLOWER, NeverAsksAgain, "faulty"),
    (FOLLOWER, NeverMissesTheLast, "faulty"),
    (FOLLOWER, RetiresForEver, "restless"),
    (FOLLOWER, BelievesAnyDigest, "silent"),
    (FOLD, NeverMissesAnybody, "faulty"),
    (TREE, IgnoresHostRemovals, "faulty"),
    (TREE, LoadsOnTop, "faulty"),
    (CONSOLIDATION, DumpsOneSeqAhead, "faulty"),
    (CONSOLIDATION, DumpsAllButOne, "faulty"),
    (CONSOLIDATION, DumpsTheDead, "faulty"),
    (CONSOLIDATION, ForgetsInSilence, "faulty"),
    (CONSOLIDATION, ForgetsNothing, "faulty"),
    (MIRROR, RemovesWithTheFirstAlias, "faulty"),
    (MIRROR, RootsOrphans, "faulty"),
    (OUTBOX, SkipsANumber, "calm"),
    (OUTBOX, LosesAnEvent, "calm"),
    (CURSOR, JumpsHoles, "faulty"),
    (CURSOR, GivesUpYoungHoles, "faulty"),
    (CURSOR, NeverGivesUp, "faulty"),
    (CURSOR, WaitsForEver, "faulty"),
    (RULES, IgnoresIdJumps, "faulty"),
)


def failing_seeds(kind: Kind) -> Iterator[int]:
    for seed in range(SEEDS[kind]):
        world = World(kind, seed)
        try:
            world.run()
            if kind == "calm":
                assert_calm(world)
        except AssertionError:
            yield seed


@pytest.mark.parametrize(("place", "bug", "kind"), PLANTED, ids=[bug.__name__ for _, bug, _ in PLANTED])
def test_the_simulation_fails_on_a_planted_bug(
    place: str, bug: type, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, bug)
    assert next(failing_seeds(kind), None) is not None
