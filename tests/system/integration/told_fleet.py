"""Workers whose ranks store, remove and clear at random (`tests/unit/indexer/life.py`), told into a real log."""

from random import Random

from indexer.follow.inputs import Question
from kv_protocol import codec, fleet, recovery, subjects
from kv_protocol.ids import WorkerRank
from kv_runtime.event_log import EventLog, LogMessage
from tests.system.integration.scripted_rank import MODEL
from tests.unit.indexer.life import Life

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
            await self._log.announce(subjects.heartbeat(MODEL, rank), fleet.encode(life.beat().heartbeat))

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
        for part in self._lives[rank].answer(Question(rank, recovery.decode_recover_request(message.data))):
            await self._log.announce(message.reply, recovery.encode(part.answer))
