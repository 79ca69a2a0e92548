"""Reads one router's journal messages on: each record once, longer ones joined, with `Lost` where some are missing."""

import math
from collections.abc import Iterator

from kv_protocol.errors import MalformedMessage
from kv_protocol.journal import JournalMessage, JournalRecord, Lost, RecordPart, decode_record


class Continuity:
    """Position in one router's messages: which records are new, and whether any are missing."""

    def __init__(self) -> None:
        self._life = 0
        self._expected = 0
        self._parts = list[bytes]()
        """Parts of a longer record that is incomplete."""

    def records(self, message: JournalMessage) -> Iterator[JournalRecord]:
        """Yield the new records of the next message, after a `Lost` if some are missing."""
        if message.life != self._life:
            self._life, self._expected = message.life, 1
            self._parts.clear()
        if message.first > self._expected:
            self._parts.clear()
            yield Lost(now_s=math.nan, count=message.first - self._expected)
        number = message.first
        for record in message.records:
            if number >= self._expected:
                if type(record) is RecordPart:
                    yield from self._joined(record)
                else:
                    self._parts.clear()
                    yield record
            number += record.count if type(record) is Lost else 1
        self._expected = max(self._expected, number)

    def _joined(self, record: RecordPart) -> Iterator[JournalRecord]:
        """Yield the longer record after its last part; `Lost` for a part that does not follow the one before."""
        if record.index != len(self._parts):
            self._parts.clear()
            yield Lost(now_s=record.now_s, count=1)
            return
        self._parts.append(record.data)
        if len(self._parts) == record.count:
            data = b"".join(self._parts)
            self._parts.clear()
            try:
                yield decode_record(data)
            except MalformedMessage:
                yield Lost(now_s=record.now_s, count=1)
