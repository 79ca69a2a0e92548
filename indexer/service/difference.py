"""Compares the blocks of an index and of a rank's mirror at one place of the stream.

    the rank is known to      their places                  verdict
    ----------------------    ---------------------------   ----------------------------------------------------------
    both                      the same                      *equal*, *differs*, or *digest*: the index's blocks are
                                                              right, its own digest of them is wrong
    both                      the mirror is ahead           the batches between are applied to the index's blocks,
                                                              then as above; if some are missing: *behind*
    both                      the index is ahead            *beyond*
    both                      in different epochs           *other_epoch*
    the mirror only                                         *unknown*
    the index only                                          *unanswered*: its mirror does not answer

A differing block is *missing* in the index, *surplus* there, on other *media*, or has another *parent*.
"""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from indexer.follow.checkpoint import RankState
from indexer.follow.question import AnsweredState
from kv_protocol import codec
from kv_protocol.digest import SetDigest, TierDigest
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS, Batch, Cleared, Event, Removed, Stored
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import BlockColumns, HeldBlock

Finding = Literal["equal", "differs", "digest", "behind", "beyond", "other_epoch", "unknown", "unanswered"]
DifferenceKind = Literal["missing", "surplus", "media", "parent"]
KINDS: tuple[DifferenceKind, ...] = ("missing", "surplus", "media", "parent")

Held = dict[int, HeldBlock]
"""What a rank holds, by sequence hash."""


class BlockDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One differing block; `parent` is the mirror's, `index_parent` the index's, equal if one side lacks the block."""

    kind: DifferenceKind
    sequence_hash: int
    parent: int | None
    index_parent: int | None
    index_media: tuple[str, ...]
    mirror_media: tuple[str, ...]


class RankVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one rank. Epoch and seq are 0 for a side that does not know the rank.

    `blocks` counts the index's blocks by medium, at its own place. `counts` counts all differences; `examples` has the
    first of each kind, parents first.
    """

    worker_id: str
    dp_rank: int
    verdict: Finding
    reason: str = ""
    stale: str = ""
    index_epoch: int = 0
    index_seq: int = 0
    mirror_epoch: int = 0
    mirror_seq: int = 0
    blocks: dict[str, int] = {}
    counts: dict[DifferenceKind, int] = {}
    examples: tuple[BlockDifference, ...] = ()


def _held_of(chunks: Iterable[BlockColumns]) -> Held:
    """Return the blocks of the chunks, in their order."""
    return {block.sequence_hash: block for chunk in chunks for block in chunk.blocks()}


def _advance(held: Held, batches: Iterable[Batch], epoch: int, seq: int, to_seq: int) -> int:
    """Apply the batches that follow `seq` up to `to_seq`, or up to the first hole; return the seq reached.

    Batches of other epochs and duplicates are skipped.
    """
    for batch in batches:
        if batch.epoch == epoch and batch.seq == seq + 1 <= to_seq:
            _apply(held, batch.event)
            seq = batch.seq
    return seq


def _apply(held: Held, event: Event) -> None:
    match event:
        case Stored():
            parent = event.parent
            for block in event.sequence_hashes:
                known = held.get(block) or HeldBlock(block, parent, 0)
                held[block] = known._replace(tier_bits=known.tier_bits | 1 << event.tier)
                parent = block
        case Removed():
            for block in event.sequence_hashes:
                _release(held, block, event.tier)
        case Cleared():
            for block in list(held):
                _release(held, block, event.tier)


def _release(held: Held, block: int, tier: int) -> None:
    known = held.get(block)
    if known is None:
        return
    left = known.tier_bits & ~(1 << tier)
    if left:
        held[block] = known._replace(tier_bits=left)
    else:
        del held[block]


def compare(
    rank: WorkerRank,
    index: RankState | None,
    mirror: AnsweredState | None,
    tail: Iterable[bytes] = (),
    *,
    examples_max: int = 10,
) -> RankVerdict:
    """Return the verdict; `tail` has the messages of the stream from the index's place up to the mirror's."""

    def told(verdict: Finding, reason: str = "", **found: Any) -> RankVerdict:  # noqa: ANN401 - as the struct has them
        return RankVerdict(
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            verdict=verdict,
            reason=reason,
            stale=index.stale if index else "",
            index_epoch=index.epoch if index else 0,
            index_seq=index.seq if index else 0,
            mirror_epoch=mirror.epoch if mirror else 0,
            mirror_seq=mirror.last_seq if mirror else 0,
            blocks=index.block_counts if index else {},
            **found,
        )

    if index is None:
        return told("unknown", "the index does not know it")
    if mirror is None:
        return told("unanswered", "its mirror does not answer")
    if index.epoch != mirror.epoch:
        return told("other_epoch", "they are in different epochs of the stream")
    if index.seq > mirror.last_seq:
        return told("beyond", "the index is ahead of its mirror")
    held = _held_of(index.chunks)
    digests = zip(index.digests, _digests(held), strict=True)
    wrong = [kept.tier.name.lower() for kept, computed in digests if kept != computed]
    try:
        batches = (batch for message in tail for batch in codec.decode_message(message))
        reached = _advance(held, batches, index.epoch, index.seq, mirror.last_seq)
    except MalformedMessage as error:
        return told("behind", f"the batches between cannot be read: {error}")
    if reached < mirror.last_seq:
        return told("behind", f"the batches between are not kept, from {reached + 1} on")
    differences = _differences(held, _held_of(mirror.chunks))
    counts = {kind: len(found) for kind in KINDS if (found := differences[kind])}
    if not counts:
        reason = f"the index's own digest is not that of its blocks: {', '.join(wrong)}"
        return told("digest", reason) if wrong else told("equal")
    examples = tuple(each for kind in KINDS for each in differences[kind][:examples_max])
    reason = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return told("differs", reason, counts=counts, examples=examples)


def _digests(held: Held) -> list[TierDigest]:
    on_tier = ((tier, [block for block, known in held.items() if known.tier_bits >> tier & 1]) for tier in TIERS)
    return [SetDigest(blocks).of_tier(tier) for tier, blocks in on_tier]


def _differences(index: Held, mirror: Held) -> dict[DifferenceKind, list[BlockDifference]]:
    found: dict[DifferenceKind, list[BlockDifference]] = {kind: [] for kind in KINDS}
    for block, mirrored in mirror.items():
        known = index.get(block)
        if known is None:
            found["missing"].append(_difference("missing", HeldBlock(block, mirrored.parent, 0), mirrored))
            continue
        if known.tier_bits != mirrored.tier_bits:
            found["media"].append(_difference("media", known, mirrored))
        if known.parent != mirrored.parent:
            found["parent"].append(_difference("parent", known, mirrored))
    for block, known in index.items():
        if block not in mirror:
            found["surplus"].append(_difference("surplus", known, HeldBlock(block, known.parent, 0)))
    return found


def _difference(kind: DifferenceKind, index: HeldBlock, mirror: HeldBlock) -> BlockDifference:
    return BlockDifference(
        kind=kind,
        sequence_hash=mirror.sequence_hash,
        parent=mirror.parent,
        index_parent=index.parent,
        index_media=_media(index),
        mirror_media=_media(mirror),
    )


def _media(block: HeldBlock) -> tuple[str, ...]:
    return tuple(tier.name.lower() for tier in block.tiers)
