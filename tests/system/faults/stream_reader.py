"""What a stream has, read beside the product's own reader."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import nats
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from kv_protocol import codec, subjects
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock

_LOOK_S = 0.1


class Stored(NamedTuple):
    """One message of a stream."""

    stream_seq: int
    subject: str
    data: bytes
    message_id: str


@asynccontextmanager
async def connected_to(urls: Sequence[str]) -> AsyncIterator[Client]:
    """A connection to one of the servers, which is not made again when it is lost."""

    async def ignore(_: Exception) -> None:
        """Ignore the error: a caller that waits for an answer notices by itself that none comes."""

    client = await nats.connect(list(urls), error_cb=ignore, allow_reconnect=False, connect_timeout=1)
    try:
        yield client
    finally:
        await client.close()


async def first_seq_of(urls: Sequence[str]) -> int:
    """Return the place of the oldest message that the stream has."""
    async with connected_to(urls) as client:
        return (await client.jetstream().stream_info(subjects.EVENTS_STREAM)).state.first_seq


@asynccontextmanager
async def squeezed(urls: Sequence[str], bytes_max: int) -> AsyncIterator[None]:
    """The stream keeps no more than so many bytes while the block runs, whatever other clients configure."""
    stop = asyncio.Event()

    async def squeeze(client: Client) -> None:
        context = client.jetstream()
        while not stop.is_set():
            config = (await context.stream_info(subjects.EVENTS_STREAM)).config
            if config.max_bytes != bytes_max:
                await context.update_stream(config, max_bytes=bytes_max)
            await Clock().sleep(_LOOK_S)

    async with connected_to(urls) as client:
        squeezing = asyncio.ensure_future(squeeze(client))
        try:
            yield
        finally:
            stop.set()
            await squeezing


async def stored_in(urls: Sequence[str]) -> list[Stored]:
    """Return all messages that the stream has at this moment, in its order."""
    messages = []
    async with connected_to(urls) as client:
        context = client.jetstream()
        state = (await context.stream_info(subjects.EVENTS_STREAM)).state
        for seq in range(state.first_seq, state.last_seq + 1):
            try:
                message = await context.get_msg(subjects.EVENTS_STREAM, seq)
            except NotFoundError:
                continue  # it has gone meanwhile
            message_id = (message.headers or {}).get("Nats-Msg-Id", "")
            messages.append(Stored(seq, message.subject or "", message.data or b"", message_id))
    return messages


def holes(messages: Iterable[Stored]) -> dict[tuple[WorkerRank, int], list[int]]:
    """Return, of every rank and epoch, the batch numbers from 1 to the newest that no message has."""
    seqs: defaultdict[tuple[WorkerRank, int], set[int]] = defaultdict(set)
    for message in messages:
        for batch in codec.decode_message(message.data):
            seqs[subjects.rank_of(message.subject), batch.epoch].add(batch.seq)
    missing = {stream: sorted(set(range(1, max(has) + 1)) - has) for stream, has in seqs.items()}
    return {stream: seqs for stream, seqs in missing.items() if seqs}
