"""Decodes the payloads of one publisher, in any dialect, into batches of engine events.

The first line that applies to an event decides:

    cleared                        accepted from any source: the cache is empty
    "Ignored"                      ignored
    a test in `IGNORED` is true    ignored (a copy that is not this engine's, a medium that is no tier)
    attention group not main       ignored (`BatchDecoder`)
    medium unknown                 refused
    no tokens                      accepted: names of blocks described before, with their current tier; a repeated name
                                   is two copies, maybe of two groups: vLLM's offload events name no groups
    a hash twice, or the parent    refused as ambiguous
      among its own blocks
    more tokens than blocks hold   refused
    fewer tokens than they hold    the full blocks are accepted, the others cut; if none is full, the event is ignored
    otherwise                      accepted

Unreadable events are refused too. Ignored events have no meaning for prefixes, refused ones might have; the rest of
the batch is processed in both cases. A hash becomes a u64: an integer mod 2^64; bytes by their last 8, big-endian,
which is what the engine sends where it sends integers. Source: `docs/SOURCES.md` E3.2, E3.3, E4.2 (ingress filter).

The wire of engine events:

    frames  = topic | sequence, 8 bytes big-endian, counts batches of one publisher from 0 | payload
    payload = msgpack [ts (s since 1970), events, dp_rank]; an event is a map with the key `type`
    replay  : to a ROUTER [empty | first sequence wanted]; per batch that is still there it answers
              [empty | topic | sequence | payload], then the end marker: sequence 2^64 - 1, empty payload

Source: `docs/SOURCES.md` E3.1, E3.2, E3.6.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import msgspec

from kv_protocol.errors import UNDECODABLE, LimitExceeded, MalformedMessage
from kv_protocol.events import Tier
from kv_protocol.splitmix import U64_MASK
from worker_agent.events.dialects.wire_events import (
    IGNORED,
    EngineHash,
    WireBlocks,
    WireCleared,
    WireIgnored,
    WireRemoved,
    WireStored,
    block_keys,
    read_event,
)
from worker_agent.events.engine_events import EngineBatch, EngineCleared, EngineEvent, EngineRemoved, EngineStored

REPLAY_END = (1 << 64) - 1
PAYLOAD_BYTES_MAX = 16 << 20
"""Bound of a frame, which sockets enforce: 2^18 blocks of 8 tokens, ten times what an engine stores in one step."""
_SEQUENCE_BYTES = 8
_FRAMES = 3
TIME_S_MAX = 9e9
"""The year 2255; about the last that an i64 of nanoseconds can represent."""
HASH_BYTES_MIN = 8
EVENTS_MAX = 1 << 18
"""How many events a batch may have: an engine with blocks of one token sends one for each token of a step."""


KINDS = (
    *("stored", "removed", "cleared", "refused", "ignored_on_request", *(kind for kind, _ in IGNORED.values())),
    *("ignored_attention_group", "ignored_partial", "names_only", "eagle", "multimodal", "byte_hashes"),
    *("cut_blocks", "unexplained_keys"),
)
"""What is counted of a publisher's events, in events unless named otherwise."""


def count(event: EngineEvent, counts: Counter[str]) -> None:
    """Count an event that is applied."""
    match event:
        case EngineStored():
            counts["stored"] += 1
            counts["names_only"] += event.names_only
            counts["eagle"] += event.is_eagle
            counts["multimodal"] += bool(event.mm_hashes)
        case EngineRemoved():
            counts["removed"] += 1
        case EngineCleared():
            counts["cleared"] += 1


class _Batch(msgspec.Struct, array_like=True):
    time_s: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_MAX)]
    dp_rank: int | None = None


_decode_batch = msgspec.msgpack.Decoder(_Batch).decode


MAIN_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


class BatchDecoder:
    """Reads the payloads of one publisher, in their order; remembers which of its attention groups count for prefixes.

    event with a kind            counts if that is in `MAIN_KINDS`; a store with a group also sets the group's kind
    event without, group known   counts if the group's last kind is in `MAIN_KINDS`
    event without, otherwise     counts if its group is 0, or if it has no group

    Main kinds hold every token of a prefix. Others (sliding windows, state spaces, cross attention, ...) hold parts,
    which do not make a prefix reusable by themselves. `GROUP_IDX_MAX` bounds the memory.
    Source: `docs/SOURCES.md` E3.3, cache groups.

    The decoder updates its `counts` in place.
    """

    def __init__(self) -> None:
        self._is_main: dict[int, bool] = {}
        self.counts = Counter[str]()

    def forget(self) -> None:
        """Forget the groups: the publisher restarted."""
        self._is_main.clear()

    def decode(self, sequence: int, payload: bytes) -> EngineBatch:
        """Return the batch in a payload; of an unreadable event it has only the problem, in `refused`.

        Raises:
            MalformedMessage: the payload is not a batch.
        """
        batch = _batch(sequence, payload)
        events: list[EngineEvent] = []
        refused = []
        for raw in batch.events:
            try:
                event = self._event(raw)
            except UNDECODABLE as error:
                refused.append(str(error))
                continue
            if event is not None:
                events.append(event)
                count(event, self.counts)
        self.counts["refused"] += len(refused)
        return EngineBatch(
            sequence=sequence,
            time_s=batch.time_s,
            dp_rank=batch.dp_rank,
            events=tuple(events),
            refused=tuple(refused),
        )

    def _event(self, raw: msgspec.Raw) -> EngineEvent | None:
        wire, is_eagle = read_event(raw)
        match wire:
            case WireStored():
                return self._stored(wire, is_eagle=is_eagle) if self._counts(wire) else None
            case WireRemoved():
                return self._removed(wire) if self._counts(wire) else None
            case WireCleared():
                return EngineCleared()
            case WireIgnored():
                self.counts["ignored_on_request"] += 1
                return None

    def _counts(self, wire: WireBlocks) -> bool:
        for field, (counted_as, is_ignored) in IGNORED.items():
            if is_ignored(getattr(wire, field)):
                self.counts[counted_as] += 1
                return False
        group_idx, kind = wire.group_idx, wire.kv_cache_spec_kind
        is_main = group_idx is None or self._is_main.get(group_idx, group_idx == 0)
        if kind is not None:
            is_main = kind in MAIN_KINDS
            if group_idx is not None and isinstance(wire, WireStored):
                self._is_main[group_idx] = is_main
        self.counts["ignored_attention_group"] += not is_main
        return is_main

    def _stored(self, wire: WireStored, *, is_eagle: bool) -> EngineStored | None:
        tier = tier_of_medium(wire.medium)
        hashes = self._hashes(wire.block_hashes)
        parent = None if wire.parent_block_hash is None else self._hashes((wire.parent_block_hash,))[0]
        if wire.token_ids and (len(set(hashes)) < len(hashes) or parent in hashes):
            raise LimitExceeded("block_hashes", "a hash twice, or the parent", "each block once, below its parent")
        blocks = _blocks_that_fit(wire, len(hashes), is_eagle=is_eagle)
        self.counts["cut_blocks"] += len(hashes) - blocks
        if hashes and not blocks:
            self.counts["ignored_partial"] += 1
            return None
        mm_hashes, namespace, unexplained = block_keys(wire, blocks if wire.token_ids else 0)
        self.counts["unexplained_keys"] += unexplained
        return EngineStored(
            block_hashes=hashes[:blocks],
            parent_block_hash=parent,
            token_ids=wire.token_ids[: blocks * wire.block_size + is_eagle],
            block_size=wire.block_size,
            tier=tier,
            namespace=namespace,
            mm_hashes=mm_hashes,
            is_eagle=is_eagle,
            group_idx=wire.group_idx or 0,
        )

    def _removed(self, wire: WireRemoved) -> EngineRemoved:
        tier = tier_of_medium(wire.medium)
        hashes = self._hashes(wire.block_hashes)
        return EngineRemoved(block_hashes=hashes, tier=tier, group_idx=wire.group_idx or 0)

    def _hashes(self, hashes: tuple[EngineHash, ...]) -> tuple[int, ...]:
        self.counts["byte_hashes"] += bytes in map(type, hashes)
        return tuple([h & U64_MASK if isinstance(h, int) else _of_bytes(h) for h in hashes])


def _batch(sequence: int, payload: bytes) -> _Batch:
    try:
        batch = _decode_batch(payload)
    except UNDECODABLE as error:
        raise MalformedMessage(0, f"batch {sequence}: {error}") from error
    if not 0 <= batch.time_s <= TIME_S_MAX:
        raise MalformedMessage(0, f"batch {sequence}: ts {batch.time_s}, allowed 0..{TIME_S_MAX:.0f} s since 1970")
    return batch


def _of_bytes(block_hash: bytes) -> int:
    if len(block_hash) < HASH_BYTES_MIN:
        raise LimitExceeded("block hash", f"{len(block_hash)} bytes", f"{HASH_BYTES_MIN} or more")
    return int.from_bytes(block_hash[-HASH_BYTES_MIN:], "big")


def _blocks_that_fit(wire: WireStored, named: int, *, is_eagle: bool) -> int:
    if not wire.token_ids:
        return named
    own_tokens = len(wire.token_ids) - is_eagle
    if wire.block_size < 1 or own_tokens > named * wire.block_size:
        raise LimitExceeded("token_ids", own_tokens, f"at most {wire.block_size} a block x {named} blocks")
    return own_tokens // wire.block_size


TIER_OF_MEDIUM = {  # as engines spell it; case counts. Source: `docs/SOURCES.md` E3.3, E3.4
    None: Tier.GPU,
    "GPU": Tier.GPU,
    "DEVICE": Tier.GPU,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.EXTERNAL,
    "NETWORK": Tier.EXTERNAL,
    "REMOTE": Tier.EXTERNAL,
    "SHARED": Tier.EXTERNAL,
}
_SHOWN_CHARACTERS_MAX = 32


def tier_of_medium(medium: str | None) -> Tier:
    """Return where blocks on `medium` lie; raise `LimitExceeded` for an unknown spelling."""
    tier = TIER_OF_MEDIUM.get(medium)
    if tier is None:
        shown = str(medium)[:_SHOWN_CHARACTERS_MAX]
        raise LimitExceeded("medium", shown, ", ".join(str(known) for known in TIER_OF_MEDIUM))
    return tier


def encode_sequence(sequence: int) -> bytes:
    """Return the sequence frame."""
    return sequence.to_bytes(_SEQUENCE_BYTES, "big")


def decode_sequence(frame: bytes) -> int:
    """Return the number in a sequence frame; raise `MalformedMessage` if it is not one."""
    if len(frame) != _SEQUENCE_BYTES:
        raise MalformedMessage(0, f"sequence frame of {len(frame)} bytes, {_SEQUENCE_BYTES} needed")
    return int.from_bytes(frame, "big")


def split_frames(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return sequence and payload of a published message; raise `MalformedMessage` for other shapes."""
    if len(frames) != _FRAMES:
        raise MalformedMessage(0, f"{len(frames)} frames, {_FRAMES} needed: topic, sequence, payload")
    return decode_sequence(frames[1]), frames[2]


def split_replay(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return sequence and payload of a replayed message, with or without its topic; raise `MalformedMessage`."""
    if len(frames) not in (_FRAMES, _FRAMES + 1) or frames[0]:
        raise MalformedMessage(0, f"{len(frames)} frames, 3 or 4 needed: empty, [topic], sequence, payload")
    return decode_sequence(frames[-2]), frames[-1]
