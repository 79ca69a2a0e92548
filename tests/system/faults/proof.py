"""Indexes are asked what they hold, consolidators what their mirrors do; here stands whether that is equal.

A mirror is asked over the log, as a reader asks that lost its place: for all it has, and for the batches since a place.

They are compared though both go on meanwhile:

    index    what it held at its place i, and what is wrong with the rank as far as it knows
    mirror   what the rank held at its place m, and the batches i + 1 .. m of its stream
    equal    i is in the mirror's epoch and not beyond m; the index has no doubt; every one of the batches was possible
             where the index was; and with them the index holds, block by block, what the mirror does

A batch is a change: what it stores was not held on that tier, and what it removes was.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import NamedTuple

import aiohttp
from nats.aio.client import Client
from nats.errors import Error as NatsError

from kv_protocol import codec, recovery, subjects
from kv_protocol.events import Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import DumpChunk, HeldBlock, RecoverRequest, ReplayChunk
from kv_runtime.clock import SystemClock
from tests.system.faults.stream_reader import connected_to

_SHOWN = 3


class Place(NamedTuple):
    """A place in a rank's stream."""

    epoch: int
    seq: int


class Held(NamedTuple):
    """What a rank held at a place, as its mirror or an index says; `stale` says why an index doubts that."""

    place: Place
    blocks: frozenset[HeldBlock]
    stale: str = ""


def difference(index: Held, mirror: Held, batches: Iterable[Batch]) -> str:
    """Return how the index differs from the mirror; empty when they are equal. `batches` may go beyond the mirror."""
    if index.place.epoch != mirror.place.epoch or index.place.seq > mirror.place.seq:
        return f"the index is at {index.place}, the mirror at {mirror.place}"
    if index.stale:
        return f"stale: {index.stale}"
    between = {batch.seq: batch.event for batch in batches if index.place.seq < batch.seq <= mirror.place.seq}
    if len(between) < mirror.place.seq - index.place.seq:
        return f"batches {index.place.seq + 1}..{mirror.place.seq}: found {sorted(between)}"
    return _block_difference(index.blocks, [between[seq] for seq in sorted(between)], mirror.blocks)


def _block_difference(index: Iterable[HeldBlock], events: Iterable[Event], mirror: frozenset[HeldBlock]) -> str:
    holding = _Holding(index)
    for event in events:
        if impossible := holding.apply(event):
            return impossible
    blocks = holding.blocks()
    sides = (("the index alone", blocks - mirror), ("the mirror alone", mirror - blocks))
    return "; ".join(f"{len(only)} held by {whose}: {sorted(only)[:_SHOWN]}" for whose, only in sides if only)


class _Holding:
    """Blocks, and what batches make of them."""

    def __init__(self, blocks: Iterable[HeldBlock]) -> None:
        self._blocks = {block.sequence_hash: block for block in blocks}

    def blocks(self) -> frozenset[HeldBlock]:
        return frozenset(self._blocks.values())

    def apply(self, event: Event) -> str:
        """Apply a change; return what was impossible about it."""
        match event:
            case Stored():
                parents = (event.parent, *event.sequence_hashes)
                return self._store(zip(event.sequence_hashes, parents, strict=False), event.tier)
            case Removed():
                return self._remove(event.sequence_hashes, event.tier)
            case Cleared():
                return self._remove([each for each in self._blocks if self._bits(each) >> event.tier & 1], event.tier)

    def _bits(self, sequence_hash: int) -> int:
        block = self._blocks.get(sequence_hash)
        return block.tier_bits if block else 0

    def _store(self, blocks: Iterable[tuple[int, int | None]], tier: Tier) -> str:
        for sequence_hash, parent in blocks:
            if self._bits(sequence_hash) >> tier & 1:
                return f"{sequence_hash} was stored, and the index had it already"
            present = self._blocks.get(sequence_hash, HeldBlock(sequence_hash, parent, 0))
            self._blocks[sequence_hash] = present._replace(tier_bits=present.tier_bits | 1 << tier)
        return ""

    def _remove(self, sequence_hashes: Iterable[int], tier: Tier) -> str:
        for sequence_hash in sequence_hashes:
            if not self._bits(sequence_hash) >> tier & 1:
                return f"{sequence_hash} was removed, and the index had it not"
            left = self._blocks[sequence_hash].tier_bits & ~(1 << tier)
            self._blocks[sequence_hash] = self._blocks[sequence_hash]._replace(tier_bits=left)
            if not left:
                del self._blocks[sequence_hash]
        return ""


_ANSWER_S = 1.0
_LOOK_S = 0.05


class Unanswered(Exception):
    """A mirror or an index did not say what it holds."""


class Mirror:
    """One rank's consolidator, over a connection of the test's own."""

    def __init__(self, client: Client, model: str, rank: WorkerRank) -> None:
        self._client, self._model, self.rank = client, model, rank

    async def held(self) -> Held:
        """Return all it has; raise `Unanswered` where no whole answer comes."""
        chunks: list[DumpChunk] = []
        async with aclosing(self._answers(RecoverRequest(request_id=1))) as answers:
            async for answer in answers:
                assert isinstance(answer, DumpChunk), answer
                chunks.append(answer)
                if len(chunks) == answer.of:
                    break
        blocks = frozenset(block for chunk in chunks for block in chunk.blocks())
        return Held(Place(chunks[0].epoch, chunks[0].last_seq), blocks)

    async def batches_after(self, place: Place) -> list[Batch]:
        """Return what its stream told after a place; raise `Unanswered` where it cannot say it any more."""
        batches: list[Batch] = []
        request = RecoverRequest(request_id=2, epoch=place.epoch, after_seq=place.seq)
        async with aclosing(self._answers(request)) as answers:
            async for answer in answers:
                if not isinstance(answer, ReplayChunk):
                    raise Unanswered(f"mirror of {self.rank}: it tells no batches after {place}")
                batches += codec.decode_message(answer.message) if answer.message else []
                if not batches or batches[-1].seq == answer.last_seq:
                    break
        return batches

    async def _answers(self, request: RecoverRequest) -> AsyncGenerator[recovery.Answer, None]:
        inbox = self._client.new_inbox()
        try:
            subscription = await self._client.subscribe(inbox)
            await self._client.publish(subjects.recover(self._model, self.rank), recovery.encode(request), reply=inbox)
            while True:
                message = await subscription.next_msg(timeout=_ANSWER_S)
                if not message.data:
                    raise Unanswered(f"mirror of {self.rank}: no mirror listens")
                yield recovery.decode_answer(message.data)
        except (NatsError, TimeoutError, OSError) as error:
            raise Unanswered(f"mirror of {self.rank}: {error!r}") from error


class IndexAt(NamedTuple):
    """An index that can be asked: a stand-alone one, or a router's, at its control plane."""

    name: str
    url: str

    async def held(self, session: aiohttp.ClientSession, rank: WorkerRank) -> Held:
        """Return what it holds of a rank; raise `Unanswered` where it does not say."""
        url, patience = f"{self.url}/v1/ranks/{rank}/blocks", aiohttp.ClientTimeout(total=_ANSWER_S)
        try:
            async with session.get(url, timeout=patience) as response:
                told = await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unanswered(f"{self.name}: {error!r}") from error
        if response.status != 200:
            raise Unanswered(f"{self.name}: {told}")
        blocks = frozenset(HeldBlock(**block) for block in told["blocks"])
        return Held(Place(told["epoch"], told["seq"]), blocks, told["stale"])


class Proof:
    """Proves indexes right, rank by rank: what is proven is not looked at again."""

    def __init__(
        self, nats_urls: Sequence[str], session: aiohttp.ClientSession, model: str, *, indexes: Iterable[IndexAt]
    ) -> None:
        self._nats_urls, self._session, self._model, self._indexes = nats_urls, session, model, tuple(indexes)
        self._began_at: dict[WorkerRank, Place] = {}
        self._unproven: dict[tuple[WorkerRank, IndexAt], str] = {}

    async def until_equal(self, ranks: Iterable[WorkerRank], *, within_s: float, moved: bool) -> None:
        """Return once every index was proven equal to the mirror of every rank.

        With `moved` an index is proven only by what came to the mirror after this call: something has to.

        Raises:
            AssertionError: not within `within_s`; it says what still differed.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self._unproven = {(rank, index): "not asked" for rank in ranks for index in self._indexes}
        while self._unproven:
            await self._look(moved=moved)
            if self._unproven and loop.time() - began_s > within_s:
                shown = [f"{index.name}, {rank}: {why}" for (rank, index), why in self._unproven.items()]
                raise AssertionError("\n".join([f"not equal within {within_s} s", *shown]))
            if self._unproven:
                await SystemClock().sleep(_LOOK_S)

    async def _look(self, *, moved: bool) -> None:
        async with AsyncExitStack() as cleanup:
            try:
                client = await cleanup.enter_async_context(connected_to(self._nats_urls))
            except (NatsError, OSError, TimeoutError) as error:
                self._unproven = dict.fromkeys(self._unproven, f"no connection: {error!r}")
                return
            for rank, index in list(self._unproven):
                mirror = Mirror(client, self._model, rank)
                self._unproven[rank, index] = await self._difference(mirror, index, moved=moved)
        self._unproven = {pair: why for pair, why in self._unproven.items() if why}

    async def _difference(self, mirror: Mirror, index: IndexAt, *, moved: bool) -> str:
        try:
            if moved and mirror.rank not in self._began_at:
                self._began_at[mirror.rank] = (await mirror.held()).place
            by_index = await index.held(self._session, mirror.rank)
            if moved and self._is_old(by_index.place, mirror.rank):
                return f"the index is at {by_index.place}, where the mirror was at first"
            by_mirror = await mirror.held()
            return difference(by_index, by_mirror, await mirror.batches_after(by_index.place))
        except Unanswered as error:
            return str(error)

    def _is_old(self, place: Place, rank: WorkerRank) -> bool:
        """Whether the mirror was there already when it was asked first."""
        began_at = self._began_at[rank]
        return place.epoch == began_at.epoch and place.seq <= began_at.seq
