"""Workers whose engines store, evict, move and clear at random, told through our consolidation, into a real log."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from bench.capture.payloads import encode_payload
from kv_protocol import fleet, subjects
from kv_protocol.events import Tier
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part
from tests.support.parts import at_work
from tests.system.integration.scripted_rank import MODEL
from worker_agent.events.consolidation import Consolidation
from worker_agent.events.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored
from worker_agent.events.rank_answers import RankAnswers

BLOCK_SIZE = 2
DP_RANKS = (0, 1)
_CAPACITY_BLOCKS = 60


class Engine:
    """One rank's cache: engine hash -> the tiers that have the block."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._tiers: dict[int, set[Tier]] = {}
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._parents: dict[int, int | None] = {}

    def events(self) -> list[EngineEvent]:
        """Return what one flush tells."""
        if self._random.random() < 0.01:
            self._tiers.clear()
            return [EngineCleared()]
        told: list[EngineEvent] = [self._store()]
        while len(self._tiers) > _CAPACITY_BLOCKS or self._random.random() < 0.3:
            told += self._evict()
        return told

    def _store(self) -> EngineStored:
        parent = self._random.choice([None, *self._tiers])
        hashes: list[int] = []
        tokens: list[int] = []
        for _ in range(self._random.randint(1, 4)):
            named = self._random.getrandbits(63) | 1
            self._parents[named] = hashes[-1] if hashes else parent
            self._tokens[named] = tuple(self._random.randrange(3) for _ in range(BLOCK_SIZE))
            self._tiers[named] = {Tier.GPU}
            hashes.append(named)
            tokens += self._tokens[named]
        return EngineStored(
            block_hashes=tuple(hashes), parent_block_hash=parent, token_ids=tuple(tokens), block_size=BLOCK_SIZE
        )

    def _evict(self) -> list[EngineEvent]:
        """Return how a block goes from the device: to the host first, or for good; one on the host goes for good."""
        if not self._tiers:
            return []
        block = self._random.choice(list(self._tiers))
        if self._tiers[block] == {Tier.GPU} and self._random.random() < 0.4:
            self._tiers[block] = {Tier.HOST}
            moved = EngineStored(
                block_hashes=(block,),
                parent_block_hash=self._parents[block],
                token_ids=self._tokens[block],
                block_size=BLOCK_SIZE,
                tier=Tier.HOST,
            )
            return [moved, EngineRemoved(block_hashes=(block,))]
        return [EngineRemoved(block_hashes=(block,), tier=tier) for tier in sorted(self._tiers.pop(block))]


class ToldWorker:
    """One worker: its engine's ranks and its consolidator's core, of which each life has new epochs."""

    def __init__(self, log: EventLog, worker_id: str, random: Random) -> None:
        self._log, self._random = log, random
        self.worker_id = worker_id
        self._sequence = 0
        self.lives = 0
        self.restart()

    @property
    def ranks(self) -> list[WorkerRank]:
        return [WorkerRank(self.worker_id, dp_rank) for dp_rank in DP_RANKS]

    def restart(self) -> None:
        """Another life begins: nothing is held, and every rank has a new epoch."""
        self.lives += 1
        instance = f"life-{self.lives}"
        self.core = Consolidation(DP_RANKS, BLOCK_SIZE, instance, lambda: self._random.getrandbits(64) | 1)
        self._engines = {dp_rank: Engine(self._random) for dp_rank in DP_RANKS}

    def position(self, rank: WorkerRank) -> tuple[int, int]:
        outbox = self.core.outbox(rank.dp_rank)
        return outbox.epoch, outbox.last_seq

    def held(self, rank: WorkerRank) -> list[HeldBlock]:
        return [block for chunk in self.core.dump(rank.dp_rank, 1) for block in chunk.blocks()]

    async def beat(self) -> None:
        for rank in self.ranks:
            pulse = fleet.encode(self.core.heartbeat(rank.dp_rank))
            await self._log.announce(subjects.heartbeat(MODEL, rank), pulse)

    def live(self, rank: WorkerRank, flushes: int = 1) -> None:
        """The rank's engine flushes so often; the mirror knows, and the log does not yet."""
        for _ in range(flushes):
            payload = encode_payload(float(self._sequence), self._engines[rank.dp_rank].events(), rank.dp_rank)
            self.core.on_payload(self._sequence, payload)
            self._sequence += 1

    async def flush(self, rank: WorkerRank, flushes: int = 1) -> list[tuple[int, str, bytes]]:
        """The rank's engine flushes so often; return what the log took: place, subject, message."""
        self.live(rank, flushes)
        outbox, taken = self.core.outbox(rank.dp_rank), []
        while (message := outbox.next_message()) is not None:
            subject = subjects.events(MODEL, rank)
            message_id = subjects.message_id(rank, outbox.epoch, message.first_seq)
            seq = await self._log.publish(subject, message.payload, message_id)
            outbox.acknowledge(message)
            taken.append((seq, subject, message.payload))
        return taken


@asynccontextmanager
async def answering(log: EventLog, *workers: ToldWorker) -> AsyncIterator[None]:
    """What is asked of the workers' mirrors, as they live now, is answered."""
    answers = [RankAnswers(MODEL, rank, each.core, log, SystemClock()) for each in workers for rank in each.ranks]
    for each in answers:
        await each.listen()
    async with at_work(*(Part(f"answers-{at}", each.run) for at, each in enumerate(answers))):
        yield
