"""The canonical batch byte by byte, written out by hand from `docs/WIRE.md`, and the numbers of splitmix64.

A change here is a change of the wire: it wants a new version number and a decision record.
"""

import pytest

from kv_protocol.codec import decode_message, encode_batch, encode_message
from kv_protocol.digest import SetDigest, TierDigest
from kv_protocol.events import Batch, Cleared, Removed, Stored, Tier
from kv_protocol.splitmix import GOLDEN_GAMMA, choice_index, splitmix64, unit_interval

Golden = tuple[Batch, str]

STORED_ROOT: Golden = (
    Batch(0x1122334455667788, 1, Stored((0x0102030405060708, 0xFFEEDDCCBBAA9988)), 2, -1),
    (
        "01 00 00 00"  # version, stored, gpu, no parent
        "88 77 66 55 44 33 22 11"  # epoch
        "01 00 00 00 00 00 00 00"  # seq
        "02 00 00 00 00 00 00 00"  # source_seq
        "ff ff ff ff ff ff ff ff"  # engine_time_ns, -1
        "00 00 00 00 00 00 00 00"  # parent, none
        "00 00 00 00"  # start
        "02 00 00 00"  # n
        "08 07 06 05 04 03 02 01"
        "88 99 aa bb cc dd ee ff"
    ),
)
STORED_CHILD: Golden = (
    Batch(1, 0xFFFFFFFFFFFFFFFF, Stored((7,), 0x8000000000000001, 0x01020304, Tier.HOST), 0, 0x0011223344556677),
    (
        "01 00 01 01"  # version, stored, host, has a parent
        "01 00 00 00 00 00 00 00"  # epoch
        "ff ff ff ff ff ff ff ff"  # seq
        "00 00 00 00 00 00 00 00"  # source_seq
        "77 66 55 44 33 22 11 00"  # engine_time_ns
        "01 00 00 00 00 00 00 80"  # parent
        "04 03 02 01"  # start
        "01 00 00 00"  # n
        "07 00 00 00 00 00 00 00"
    ),
)
STORED_CHILD_OF_HASH_0: Golden = (
    Batch(0, 3, Stored((0,), 0, 1)),
    (
        "01 00 00 01"  # a parent whose hash is 0 is a parent
        "00 00 00 00 00 00 00 00"
        "03 00 00 00 00 00 00 00"
        "00 00 00 00 00 00 00 00"
        "00 00 00 00 00 00 00 00"
        "00 00 00 00 00 00 00 00"
        "01 00 00 00"
        "01 00 00 00"
        "00 00 00 00 00 00 00 00"
    ),
)
REMOVED: Golden = (
    Batch(2, 3, Removed((0x00000000000000FF, 0xFF00000000000000), Tier.DISK), 4, 5),
    (
        "01 01 02 00"  # version, removed, disk
        "02 00 00 00 00 00 00 00"
        "03 00 00 00 00 00 00 00"
        "04 00 00 00 00 00 00 00"
        "05 00 00 00 00 00 00 00"
        "00 00 00 00 00 00 00 00"
        "00 00 00 00"
        "02 00 00 00"
        "ff 00 00 00 00 00 00 00"
        "00 00 00 00 00 00 00 ff"
    ),
)
CLEARED: Golden = (
    Batch(2, 4, Cleared(Tier.EXTERNAL), 5, 6),
    (
        "01 02 03 00"  # version, cleared, external
        "02 00 00 00 00 00 00 00"
        "04 00 00 00 00 00 00 00"
        "05 00 00 00 00 00 00 00"
        "06 00 00 00 00 00 00 00"
        "00 00 00 00 00 00 00 00"
        "00 00 00 00"
        "00 00 00 00"
    ),
)
SPLITMIX64_OF_SEED_0 = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
"""First three outputs for seed 0, as printed for the reference implementation and for Java's SplittableRandom."""


@pytest.mark.parametrize(
    ("batch", "layout"),
    [STORED_ROOT, STORED_CHILD, STORED_CHILD_OF_HASH_0, REMOVED, CLEARED],
    ids=["stored_root", "stored_child", "stored_child_of_hash_0", "removed", "cleared"],
)
def test_a_batch_is_its_golden_bytes(batch: Batch, layout: str) -> None:
    assert encode_batch(batch).hex(" ") == bytes.fromhex(layout).hex(" ")
    assert decode_message(bytes.fromhex("01 00" + layout)) == [batch]


def test_a_message_is_a_count_and_its_batches_in_order() -> None:
    parts = [REMOVED, STORED_CHILD, CLEARED]
    batches, message = [batch for batch, _ in parts], bytes.fromhex("03 00" + "".join(layout for _, layout in parts))
    assert encode_message(batches) == message
    assert decode_message(message) == batches


def test_splitmix64_gives_the_reference_outputs() -> None:
    states = (0, GOLDEN_GAMMA, 2 * GOLDEN_GAMMA % 2**64)
    assert tuple(splitmix64(state) for state in states) == SPLITMIX64_OF_SEED_0


def test_draw_n_of_a_seed_is_the_top_53_bits_of_its_nth_reference_output() -> None:
    drawn = [unit_interval(0, draw) for draw in range(3)]
    assert drawn == [output // 2**11 / 2**53 for output in SPLITMIX64_OF_SEED_0]
    assert [choice_index(0, 10, draw) for draw in range(3)] == [8, 4, 0]  # 0.883.., 0.431.., 0.026..


def test_the_digest_of_a_set_is_the_sum_worked_out_by_hand() -> None:
    # e220a8397b1dcdaf + 6e789e6aa1b965f4 + 06c45d188009454f = 1_575da3bc9ce078f2
    digest = SetDigest([0, 0x9E3779B97F4A7C15, 0x3C6EF372FE94F82A])
    assert digest.total == 0x575DA3BC9CE078F2
    assert {top: total for top, total in enumerate(digest.buckets) if total} == {
        0x00: 0xE220A8397B1DCDAF,
        0x9E: 0x6E789E6AA1B965F4,
        0x3C: 0x06C45D188009454F,
    }
    assert digest.of_tier(Tier.DISK) == TierDigest(Tier.DISK, 3, 0x575DA3BC9CE078F2)
