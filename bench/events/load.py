"""The load of the event bench: blocks of sequences that grow side by side, as an engine reports them; all by seed.

    sequence   a chain of 512 blocks of tokens that no other sequence has
    event      some blocks of one sequence, stored; then as many of the next, `SIDE_BY_SIDE` of them alternating
    payload    several events in one engine-event message
    schedule   flushes, evenly in time, each with the events that an engine would report at that moment

Tokens are u16s. Engine hashes count up from a start that differs by 2^40 from seed to seed.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import shake_128
from itertools import islice
from math import ceil
from typing import NamedTuple

from bench.capture.payloads import encode_payload
from worker_agent.events.engine_events import EngineStored

SEQUENCE_BLOCKS = 512
SIDE_BY_SIDE = 16
FLUSH_S = 0.02
"""The duration of an engine's iteration; the engine reports what it computed at its end."""
_KEY = struct.Struct("<QQ")
_HASHES_OF_A_SEED = 1 << 40


class EventLoad(NamedTuple):
    """So many blocks of `block_size` tokens, in events of `event_blocks`; another seed gives other blocks."""

    seed: int
    blocks: int
    event_blocks: int
    block_size: int


def engine_events(load: EventLoad) -> Iterator[EngineStored]:
    """Yield the events, each of `event_blocks` blocks; fewer at the end of a sequence or of the load."""
    sequences = ceil(load.blocks / SEQUENCE_BLOCKS)
    for first in range(0, sequences, SIDE_BY_SIDE):
        group = range(first, min(first + SIDE_BY_SIDE, sequences))
        tokens = {number: _tokens(load, number) for number in group}
        for start in range(0, SEQUENCE_BLOCKS, load.event_blocks):
            for number in group:
                end = min(start + load.event_blocks, SEQUENCE_BLOCKS, load.blocks - number * SEQUENCE_BLOCKS)
                if start < end:
                    yield _stored(load, number, tokens[number], range(start, end))


def _tokens(load: EventLoad, number: int) -> "array[int]":
    tokens = array("H")
    tokens.frombytes(shake_128(_KEY.pack(load.seed, number)).digest(2 * load.block_size * SEQUENCE_BLOCKS))
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def _stored(load: EventLoad, number: int, tokens: "array[int]", blocks: range) -> EngineStored:
    before = load.seed * _HASHES_OF_A_SEED + number * SEQUENCE_BLOCKS
    return EngineStored(
        block_hashes=tuple(range(before + blocks.start + 1, before + blocks.stop + 1)),
        parent_block_hash=before + blocks.start if blocks.start else None,
        token_ids=tuple(tokens[load.block_size * blocks.start : load.block_size * blocks.stop]),
        block_size=load.block_size,
    )


def payloads(
    events: Iterable[EngineStored], events_each: int, *, dp_rank: int = 0, time_s: float = 0.0
) -> Iterator[bytes]:
    """Yield the events as engine-event payloads with the time `time_s`."""
    rest = iter(events)
    while part := list(islice(rest, events_each)):
        yield encode_payload(time_s, part, dp_rank)


class Flush(NamedTuple):
    """Events that an engine reports `after_s` seconds after the start."""

    after_s: float
    events: Sequence[EngineStored]


def schedule(load: EventLoad, blocks_s: float) -> list[Flush]:
    """Return the flushes of an engine that computes so many blocks a second: one each `FLUSH_S`, or each event."""
    period_s = max(FLUSH_S, load.event_blocks / blocks_s)
    flushed_blocks, flushes = 0, dict[int, list[EngineStored]]()
    for event in engine_events(load):
        flushed_blocks += len(event.block_hashes)
        flushes.setdefault(ceil(flushed_blocks / (period_s * blocks_s)), []).append(event)
    return [Flush(number * period_s, events) for number, events in flushes.items()]
