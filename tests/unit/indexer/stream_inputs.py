"""What comes to a stream's state machine, in few words, and what it does to the rank's blocks."""

from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

from msgspec.structs import replace

from indexer.follow.follower import FollowerLimits, StreamFollower
from indexer.follow.question import Wants
from indexer.follow.status import FollowerCounts, StaleReason
from indexer.index.prefix_index import Hashes, IndexStatistics
from kv_protocol import codec
from kv_protocol.digest import BUCKET_SET_BYTES, SetDigest, TierDigest
from kv_protocol.events import Batch, Cleared, Event, Stored, Tier
from kv_protocol.fleet import Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import BlockColumns, DumpChunk, HeldBlock, ReplayChunk, block_columns
from tests.dumped import dump_chunks
from tests.reference.index.index import ReferenceIndex

EPOCH, LATER, THIRD = 11, 22, 33
LIMITS = FollowerLimits(gap_s=0.0, behind_s=2.0, answer_s=2.0, backoff_max_s=8.0, early_batches_max=4, silent_s=3.0)
FAR = 1 << 21
FIRST_BUCKET = b"\x01" + bytes(BUCKET_SET_BYTES - 1)
"""The bucket of all small hashes."""


class OpenQuestion(NamedTuple):
    """A question that is sent."""

    request_id: int
    wants: Wants | None


class Refused(NamedTuple):
    """Bytes could not be read."""


class Tick(NamedTuple):
    """Nothing but time."""


class ApplyEvent(NamedTuple):
    """An event was applied."""

    event: Event


class ReplaceAll(NamedTuple):
    """All blocks were replaced."""

    chunks: tuple[BlockColumns, ...] = ()


class RepairBuckets(NamedTuple):
    """The blocks of these buckets were replaced."""

    buckets: bytes
    chunks: tuple[BlockColumns, ...]


Effect = ApplyEvent | ReplaceAll | RepairBuckets


class Recorded(ReferenceIndex):
    """Keeps what is done to it; refuses `refuses` blocks of each change; holds what a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.effects: list[Effect] = []
        self.refuses = 0
        self.digest_of = holds()
        self.memory_bytes = FULL.memory_bytes

    def store(self, _: int, parent: int | None, sequence_hashes: Hashes, tier: Tier, __: float) -> int:
        return self._keep(ApplyEvent(Stored(tuple(sequence_hashes), parent, tier=tier)))

    def clear(self, _: int, tier: Tier | None = None) -> None:
        self._keep(ReplaceAll() if tier is None else ApplyEvent(Cleared(tier)))

    def load(self, _: int, chunks: Iterable[BlockColumns], __: float) -> int:
        return self._keep(ReplaceAll(tuple(chunks)))

    def repair(self, _: int, buckets: bytes, chunks: Iterable[BlockColumns], __: float) -> int:
        return self._keep(RepairBuckets(buckets, tuple(chunks)))

    def _keep(self, effect: Effect) -> int:
        self.effects.append(effect)
        return self.refuses

    def digest(self, _: int, tier: Tier) -> TierDigest:
        return self.digest_of(tier)

    def statistics(self) -> IndexStatistics:
        return replace(FULL, memory_bytes=self.memory_bytes)


FULL = replace(ReferenceIndex().statistics(), memory_bytes=100, nodes=100)


class Stream(StreamFollower):
    """A stream of a rank with recorded blocks."""

    def __init__(self, limits: FollowerLimits = LIMITS) -> None:
        self.blocks = Recorded()
        super().__init__(WorkerRank("w", 0), self.blocks, 0, limits, count(1))

    @property
    def stale(self) -> StaleReason:
        return self.status()[2]


Input = Batch | Heartbeat | DumpChunk | ReplayChunk | Refused | Tick
REFUSED, TICK = Refused(), Tick()


def batch(seq: int, epoch: int = EPOCH) -> Batch:
    return Batch(epoch, seq, Stored((seq,)))


def applied(*seqs: int) -> list[Effect]:
    return [ApplyEvent(Stored((seq,))) for seq in seqs]


def tail(request_id: int) -> OpenQuestion:
    return OpenQuestion(request_id, "tail")


def repair(request_id: int) -> OpenQuestion:
    return OpenQuestion(request_id, "repair")


def dump(request_id: int) -> OpenQuestion:
    return OpenQuestion(request_id, "dump")


def pulse(last_seq: int, epoch: int = EPOCH, *, held: Iterable[int] = (), stale: str = "") -> Heartbeat:
    tiers = (SetDigest(held).of_tier(Tier.GPU),)
    return Heartbeat(instance="i", epoch=epoch, last_seq=last_seq, tiers=tiers, stale=stale)


def rows(*held: int) -> tuple[HeldBlock, ...]:
    return tuple(HeldBlock(block, None, 1) for block in held)


def columns(*held: int, size: int = 99) -> tuple[BlockColumns, ...]:
    return tuple(block_columns(rows(*held), size))


def answer(request_id: int, last_seq: int, *held: int, epoch: int = EPOCH, size: int = 99) -> list[DumpChunk]:
    return dump_chunks(request_id, epoch, last_seq, rows(*held), chunk_blocks=size)


def whole(request_id: int, last_seq: int, *held: int, epoch: int = EPOCH) -> DumpChunk:
    return answer(request_id, last_seq, *held, epoch=epoch)[0]


def repaired(
    request_id: int, last_seq: int, *held: int, epoch: int = EPOCH, buckets: bytes = FIRST_BUCKET
) -> DumpChunk:
    return dump_chunks(request_id, epoch, last_seq, rows(*held), buckets=buckets)[0]


def mended(*held: int) -> RepairBuckets:
    return RepairBuckets(FIRST_BUCKET, columns(*held))


def replay(request_id: int, last_seq: int, *seqs: int, epoch: int = EPOCH) -> ReplayChunk:
    message = codec.encode_message([batch(seq, epoch) for seq in seqs]) if seqs else b""
    return ReplayChunk(request_id=request_id, epoch=epoch, last_seq=last_seq, message=message)


def holds(*held: int) -> Callable[[Tier], TierDigest]:
    return lambda tier: SetDigest(held if tier is Tier.GPU else ()).of_tier(tier)


def give(
    follower: Stream, one: Input, now_s: float = 0, digest_of: Callable[[Tier], TierDigest] | None = None
) -> list[Effect | OpenQuestion]:
    """Return what the stream does and wants to ask, which is asked at once."""
    follower.blocks.effects, follower.blocks.digest_of = [], digest_of or holds()
    _give(follower, one, now_s)
    follower.prove(now_s)
    effects: list[Effect | OpenQuestion] = [*follower.blocks.effects]
    return [*effects, begun(follower, now_s)] if follower.question.is_due(now_s) else effects


def begun(follower: Stream, now_s: float) -> OpenQuestion:
    return OpenQuestion(follower.question.begin(follower.position[1], now_s), follower.question.wants)


def _give(follower: Stream, one: Input, now_s: float) -> None:
    match one:
        case Batch():
            follower.on_batch(one, now_s)
        case Heartbeat():
            follower.on_heartbeat(one, now_s)
        case DumpChunk() | ReplayChunk():
            follower.on_answer(one, now_s)
        case Refused():
            follower.on_refused(now_s)
        case Tick():
            follower.tick(now_s)


def after(*inputs: Input, limits: FollowerLimits = LIMITS) -> Stream:
    """Return a follower to which all this came at 0 s."""
    follower = Stream(limits)
    for one in inputs:
        give(follower, one)
    return follower


def overfull(*inputs: Input) -> Stream:
    follower = after(*inputs)
    follower.full_at = FULL
    return follower


def counts(follower: Stream) -> FollowerCounts:
    return follower.statistics().counts


NEW: list[Input] = []
LIVE: list[Input] = [batch(1), batch(2), batch(3)]
PULSED: list[Input] = [pulse(0), *LIVE]
BEHIND: list[Input] = [*LIVE, pulse(4)]
HOLE: list[Input] = [*LIVE, batch(6)]
DOUBT: list[Input] = [*LIVE, REFUSED]
BOTH_EPOCHS: list[Input] = [*PULSED, pulse(0, LATER)]
