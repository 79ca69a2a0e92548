"""Single messages of a stream by seq and by time, without reading it in order.

A seq without a message gives the first message behind it. Times are read in nanoseconds, so that messages of one
microsecond stay apart: the client's own `get_msg` cuts them to microseconds. They are the server's, and ascend unless
its clock is set back or another server of a cluster takes over.
"""

import base64
from collections.abc import Mapping

import msgspec
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from kv_runtime.event_log.reading import LogMessage
from kv_runtime.event_log.streams import answer_of, ns_of, state_of

_NO_MESSAGE = 10037
"""The server's code for a stream without such a message; a missing stream has another code."""


class _Message(msgspec.Struct, frozen=True):
    subject: str
    seq: int
    time: str
    data: str = ""
    hdrs: str = ""


class _Found(msgspec.Struct, frozen=True):
    message: _Message


async def message_from(
    client: Client, stream: str, seq: int, timeout_s: float, subject: str = ">"
) -> LogMessage | None:
    """Return the message of `subject`, which may have wildcards, at `seq` or the first behind it; None: there is none.

    Raises:
        NatsError: there is no such stream, or no answer.
    """
    question = msgspec.json.encode({"seq": max(seq, 1), "next_by_subj": subject})
    try:
        answer = await answer_of(client, f"STREAM.MSG.GET.{stream}", _Found, timeout_s, question)
    except NotFoundError as error:
        if error.err_code != _NO_MESSAGE:
            raise
        return None
    found = answer.message
    headers, data = _headers(base64.b64decode(found.hdrs)), base64.b64decode(found.data)
    return LogMessage(found.subject, data, found.seq, time_ns=ns_of(found.time), headers=headers)


def _headers(block: bytes) -> Mapping[str, str] | None:
    """Parse a block of headers: a line with the version, then `name: value`, each line ended by CRLF."""
    lines = block.decode(errors="replace").split("\r\n")[1:]
    fields = (line.partition(":") for line in lines if line)
    return {name: value.strip() for name, _, value in fields} or None


async def seq_at(client: Client, stream: str, time_ns: int, timeout_s: float) -> int:
    """Return the seq of the last message of that time or earlier; if all are later, the first message's seq less 1.

    Raises:
        NatsError: there is no such stream, or no answer.
    """
    state = await state_of(client, stream, timeout_s)
    low, high = state.first_seq - 1, state.last_seq
    while low < high:  # the message at `low` is not later, those behind `high` are
        middle = (low + high + 1) // 2
        found = await message_from(client, stream, middle, timeout_s)
        if found is None or found.time_ns > time_ns:
            high = middle - 1
        else:
            low = found.stream_seq
    return low
