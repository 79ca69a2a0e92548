"""The canonical batch on hop B (`docs/GLOSSARY.md`), little-endian like our machines, without token ids.

    message  = count u16, then `count` batches
    batch    = version u8 | kind u8 (stored 0, removed 1, cleared 2) | tier u8 | flags u8
               epoch u64 | seq u64 | source_seq u64 | engine_time_ns i64
               parent u64 (valid if bit 0 of flags is set) | start u32 | n u32 | n x u64 sequence hashes

Source: `docs/WIRE.md`. A message is at most 512 KiB: larger stores are split into parent-linked
parts before seqs are assigned (`split_event`), so that a lost part is a gap like any other.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence

from typing_extensions import Buffer

from kv_protocol.errors import LimitExceeded, MalformedMessage
from kv_protocol.events import TIERS, Batch, Cleared, Event, Removed, Stored, Tier

VERSION = 1
MESSAGE_BYTES_MAX = 512 * 1024
BATCHES_PER_MESSAGE_MAX = 0xFFFF

_COUNT = struct.Struct("<H")
_HEAD = struct.Struct("<BBBBQQQqQII")
BLOCKS_PER_EVENT_MAX = (MESSAGE_BYTES_MAX - _COUNT.size - _HEAD.size) // 8
_STORED, _REMOVED, _CLEARED = 0, 1, 2
_HAS_PARENT = 1


def pack_u64(values: Sequence[int]) -> bytes:
    """Return the values as little-endian u64s; raise `LimitExceeded` if a value is not a u64."""
    try:
        return array("Q", values).tobytes()
    except (OverflowError, TypeError) as error:
        raise LimitExceeded("hash", str(error), "u64") from error


def unpack_u64(data: bytes | memoryview) -> tuple[int, ...]:
    """Return the little-endian u64s in `data`, whose length is a multiple of 8."""
    unpacked = array("Q")
    unpacked.frombytes(data)
    return tuple(unpacked)


def split_event(event: Event, blocks_max: int = BLOCKS_PER_EVENT_MAX) -> Iterator[Event]:
    """Yield parts of at most `blocks_max` blocks that, applied in order, equal `event`."""
    if isinstance(event, Cleared) or len(event.sequence_hashes) <= blocks_max:
        yield event
        return
    hashes = event.sequence_hashes
    for at in range(0, len(hashes), blocks_max):
        part = hashes[at : at + blocks_max]
        if isinstance(event, Removed):
            yield Removed(part, event.tier)
        else:
            yield Stored(part, hashes[at - 1] if at else event.parent, event.start + at, event.tier)


def encode_batch(batch: Batch) -> bytes:
    """Return the bytes of one batch; raise `LimitExceeded` if it is too large for a message."""
    event = batch.event
    parent, start, flags, hashes = 0, 0, 0, b""
    if isinstance(event, Cleared):
        kind = _CLEARED
    else:
        kind = _REMOVED if isinstance(event, Removed) else _STORED
        if len(event.sequence_hashes) > BLOCKS_PER_EVENT_MAX:
            raise LimitExceeded("n", len(event.sequence_hashes), f"at most {BLOCKS_PER_EVENT_MAX} blocks")
        hashes = pack_u64(event.sequence_hashes)
    if isinstance(event, Stored):
        start = event.start
        if event.parent is not None:
            parent, flags = event.parent, _HAS_PARENT
    try:
        head = _HEAD.pack(
            VERSION, kind, event.tier, flags, batch.epoch, batch.seq, batch.source_seq, batch.engine_time_ns,
            parent, start, len(hashes) // 8,
        )  # fmt: skip
    except struct.error as error:
        raise LimitExceeded("batch head", str(error), "the widths of the canonical batch") from error
    return head + hashes


def pack_message(encoded: Sequence[bytes]) -> bytes:
    """Return one message of already encoded batches; raise `LimitExceeded` beyond the bounds of a message."""
    if not 1 <= len(encoded) <= BATCHES_PER_MESSAGE_MAX:
        raise LimitExceeded("count", len(encoded), f"1..{BATCHES_PER_MESSAGE_MAX} batches")
    message = _COUNT.pack(len(encoded)) + b"".join(encoded)
    if len(message) > MESSAGE_BYTES_MAX:
        raise LimitExceeded("message", len(message), f"at most {MESSAGE_BYTES_MAX} bytes")
    return message


def encode_message(batches: Sequence[Batch]) -> bytes:
    """Return one message of `batches`."""
    return pack_message([encode_batch(batch) for batch in batches])


def decode_message(data: Buffer) -> list[Batch]:
    """Return the batches of a message; raise `MalformedMessage`, with offset and reason, if one is invalid."""
    view = memoryview(data).cast("B")
    if len(view) > MESSAGE_BYTES_MAX:
        raise MalformedMessage(MESSAGE_BYTES_MAX, f"{len(view)} bytes, at most {MESSAGE_BYTES_MAX} allowed")
    if len(view) < _COUNT.size:
        raise MalformedMessage(0, f"{len(view)} bytes, a count needs {_COUNT.size}")
    (count,) = _COUNT.unpack_from(view)
    if count == 0:
        raise MalformedMessage(0, "count is 0, at least one batch is needed")
    at, batches = _COUNT.size, []
    for _ in range(count):
        batch, at = _batch_at(view, at)
        batches.append(batch)
    if at != len(view):
        raise MalformedMessage(at, f"{len(view) - at} bytes after the last of {count} batches")
    return batches


def _batch_at(view: memoryview, at: int) -> tuple[Batch, int]:
    """Return the batch that begins at byte `at`, and where it ends."""
    if len(view) - at < _HEAD.size:
        raise MalformedMessage(at, f"{len(view) - at} bytes left, a batch head needs {_HEAD.size}")
    version, kind, tier, flags, epoch, seq, source_seq, time_ns, parent, start, n = _HEAD.unpack_from(view, at)
    body = at + _HEAD.size
    end = body + 8 * n
    if version != VERSION:
        raise MalformedMessage(at, f"version {version}, only {VERSION} is known")
    if end > len(view):
        raise MalformedMessage(body - 4, f"n is {n} blocks, only {(len(view) - body) // 8} follow")
    if tier >= len(TIERS):
        raise MalformedMessage(at + 2, f"tier {tier}, allowed 0..{len(TIERS) - 1}")
    if flags & ~_HAS_PARENT:
        raise MalformedMessage(at + 3, f"flags {flags:#x}, only bit 0 is known")
    try:
        event = _event(kind, TIERS[tier], parent if flags else None, start, unpack_u64(view[body:end]))
        return Batch(epoch, seq, event, source_seq, time_ns), end
    except LimitExceeded as error:
        raise MalformedMessage(at, str(error)) from error


def _event(kind: int, tier: Tier, parent: int | None, start: int, hashes: tuple[int, ...]) -> Event:
    if kind == _STORED:
        return Stored(hashes, parent, start, tier)
    if parent is not None or start:
        raise LimitExceeded("parent and start", (parent, start), "only on a stored event")
    if kind == _REMOVED:
        return Removed(hashes, tier)
    if kind == _CLEARED and not hashes:
        return Cleared(tier)
    raise LimitExceeded("kind", kind, f"{_STORED} stored, {_REMOVED} removed, {_CLEARED} cleared (without blocks)")
