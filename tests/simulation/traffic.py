"""What was delivered to one life of an index, in blocks, and how much that may be.

    a batch    counts as many as it names blocks, and one at least; of the log or of a replay, new or had before
    a dump, or a repair, counts as many as it has blocks

    allowed   = `RATIO` * published + `PER_EPOCH` * epochs that there were while the world lasted
    published = batches that all outboxes numbered * what a batch of the log counts on average

Recovery must not multiply traffic: a reader gets what was published once from the log, and may get as much again twice.
What an outbox had to drop was published, too: only a dump can tell of it. The second term lets whoever begins late
learn what each life of a rank holds, however little was published before.
"""

from kv_protocol.recovery import Answer, ReplayChunk

RATIO = 3
PER_EPOCH = 16
"""A rank of these worlds holds up to some 80 blocks."""
_COUNT_BYTES, _HEAD_BYTES, _BLOCK_BYTES = 2, 52, 8


def batches_of(message: bytes) -> int:
    """Return how many batches a message has."""
    return int.from_bytes(message[:_COUNT_BYTES], "little")


def blocks_of(message: bytes) -> int:
    """Return what the batches of a message count; of one that is cut, as much as is there."""
    batches = batches_of(message)
    return max(batches, (len(message) - _COUNT_BYTES - batches * _HEAD_BYTES) // _BLOCK_BYTES)


def blocks_max(published: float, epochs: int) -> float:
    """Return how much may be delivered to one life of an index."""
    return RATIO * published + PER_EPOCH * epochs


class Traffic:
    """Counts since the life began."""

    def __init__(self) -> None:
        self.questions = 0
        self.logged = self.replayed = self.dumped = 0

    def __repr__(self) -> str:
        return f"{self.logged} by the log, {self.replayed} by replays, {self.dumped} by dumps, {self.questions} asked"

    def on_message(self, data: bytes) -> None:
        """A message of the log was delivered."""
        self.logged += blocks_of(data)

    def on_answer(self, answer: Answer) -> None:
        """Part of an answer was delivered."""
        if isinstance(answer, ReplayChunk):
            self.replayed += blocks_of(answer.message)
        else:
            self.dumped += len(answer.tiers)

    @property
    def blocks(self) -> int:
        """All that was delivered."""
        return self.logged + self.replayed + self.dumped
