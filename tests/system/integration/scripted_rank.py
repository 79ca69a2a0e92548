"""Ranks' consolidators on a real log: one does exactly what a test says; a told worker's live at random."""

import asyncio
from random import Random

from kv_protocol import codec, fleet, recovery, subjects
from kv_protocol.digest import SetDigest
from kv_protocol.events import Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.fleet import Heartbeat, WorkerLeft
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock
from kv_runtime.event_log import EventLog, LogMessage
from tests.dumped import dump_chunks
from tests.reference.index.nodes import parents_first
from tests.unit.indexer.life import Life

MODEL = "sim-8b"


class ScriptedRank:
    """Holds blocks on the GPU; `store` and `remove` publish what they do, `silently` leaves a gap."""

    def __init__(self, log: EventLog, worker_id: str = "w0", dp_rank: int = 0) -> None:
        self.log = log
        self.rank = WorkerRank(worker_id, dp_rank)
        self.epoch = 7
        self.seq = 0
        self.blocks: dict[int, int | None] = {}
        self.dumps_asked = 0
        self.replied_to = ""
        """The subject that the newest question named for its answer."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @property
    def subject(self) -> str:
        return subjects.events(MODEL, self.rank)

    async def start(self) -> None:
        await self.log.listen(subjects.recover(MODEL, self.rank), self._answer)

    async def store(self, *hashes: int, parent: int | None = None, silently: bool = False) -> None:
        event = Stored(hashes, parent, self._position(parent))
        for at, sequence_hash in enumerate(hashes):
            self.blocks[sequence_hash] = hashes[at - 1] if at else parent
        await self._tell(event, silently=silently)

    async def remove(self, *hashes: int) -> None:
        for sequence_hash in hashes:
            del self.blocks[sequence_hash]
        await self._tell(Removed(hashes))

    async def clear(self) -> None:
        self.blocks.clear()
        await self._tell(Cleared())

    async def publish_raw(self, data: bytes) -> None:
        await self.log.publish(self.subject, data)

    async def beat(self, *, stale: str = "") -> None:
        digest = SetDigest(self.blocks).of_tier(Tier.GPU)
        heartbeat = Heartbeat(
            instance="i", epoch=self.epoch, last_seq=self.seq, tiers=(digest,) if self.blocks else (), stale=stale
        )
        await self.log.announce(subjects.heartbeat(MODEL, self.rank), fleet.encode(heartbeat))

    async def leave(self) -> None:
        left = WorkerLeft(worker_id=self.rank.worker_id, instance="i", reason="test")
        await self.log.publish(subjects.fleet(MODEL, self.rank.worker_id), fleet.encode(left))

    def held(self) -> list[HeldBlock]:
        return [HeldBlock(block, self.blocks[block], 1 << Tier.GPU) for block in parents_first(self.blocks)]

    def _position(self, parent: int | None) -> int:
        position = 0
        while parent is not None:
            parent, position = self.blocks[parent], position + 1
        return position

    async def _tell(self, event: Event, *, silently: bool = False) -> None:
        self.seq += 1
        if not silently:
            message = codec.encode_message([Batch(self.epoch, self.seq, event, 0, 1)])
            await self.log.publish(self.subject, message, subjects.message_id(self.rank, self.epoch, self.seq))

    async def _answer(self, message: LogMessage) -> None:
        request = recovery.decode_recover_request(message.data)
        self.dumps_asked += 1
        self.replied_to = message.reply
        await self.may_answer.wait()
        for chunk in dump_chunks(request.request_id, self.epoch, self.seq, self.held(), chunk_blocks=2):
            await self.log.announce(message.reply, recovery.encode(chunk))


DP_RANKS = (0, 1)


class ToldWorker:
    """One worker; `restart` begins another life of its ranks, with new epochs and without blocks."""

    def __init__(self, log: EventLog, worker_id: str, random: Random) -> None:
        self._log, self._random = log, random
        self._lives = {rank: Life(rank, random) for rank in (WorkerRank(worker_id, dp_rank) for dp_rank in DP_RANKS)}

    @property
    def ranks(self) -> list[WorkerRank]:
        return list(self._lives)

    def restart(self) -> None:
        for life in self._lives.values():
            life.begin(self._random.getrandbits(64) | 1)

    def position(self, rank: WorkerRank) -> tuple[int, int]:
        return self._lives[rank].epoch, self._lives[rank].seq

    async def beat(self) -> None:
        for rank, life in self._lives.items():
            await self._log.announce(subjects.heartbeat(MODEL, rank), fleet.encode(life.heartbeat()))

    async def flush(self, rank: WorkerRank, batches: int = 1) -> tuple[int, str, bytes]:
        """Publish batches in one message; return what the log took: place, subject, message."""
        life, subject = self._lives[rank], subjects.events(MODEL, rank)
        message_id = subjects.message_id(rank, life.epoch, life.seq + 1)
        message = codec.encode_message([life.batch() for _ in range(batches)])
        return await self._log.publish(subject, message, message_id), subject, message

    async def answer_all(self) -> None:
        """Answer from now on what the ranks' mirrors are asked, as they live then."""
        for rank in self._lives:
            await self._log.listen(subjects.recover(MODEL, rank), self._answer)

    async def _answer(self, message: LogMessage) -> None:
        rank = subjects.rank_of(message.subject)
        for part in self._lives[rank].parts(recovery.decode_recover_request(message.data)):
            await self._log.announce(message.reply, recovery.encode(part))
