import pytest

from kv_protocol.digest import BUCKETS, SetDigest, TierDigest, bucket_table, differing_buckets, is_in_buckets
from kv_protocol.errors import LimitExceeded
from kv_protocol.events import Tier
from kv_protocol.splitmix import choice_index, splitmix64

HASHES = [0, 1, 2**56 - 1, 2**56, 2**63, 2**64 - 1]


@pytest.mark.parametrize("tier", Tier)
def test_a_heartbeat_says_count_and_digest_of_a_tier(tier: Tier) -> None:
    assert SetDigest([1]).of_tier(tier) == TierDigest(tier, 1, splitmix64(1))


@pytest.mark.parametrize(
    ("block_count", "digest", "field"),
    [(-1, 0, "block_count"), (2**64, 0, "block_count"), (0, -1, "digest"), (0, 2**64, "digest")],
)
def test_a_tier_digest_beyond_u64_cannot_exist(block_count: int, digest: int, field: str) -> None:
    with pytest.raises(LimitExceeded, match=rf"^{field}: "):
        TierDigest(Tier.GPU, block_count, digest)


def test_a_choice_among_nothing_is_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        choice_index(1, 0)


def test_two_tables_differ_in_the_buckets_of_the_blocks_that_only_one_has_on_a_tier() -> None:
    mine = [SetDigest(HASHES), SetDigest(), SetDigest([5 << 56]), SetDigest()]
    theirs = [SetDigest(HASHES[:-1]), SetDigest(), SetDigest(), SetDigest([7 << 56])]
    table, other = (bucket_table(digest.buckets for digest in tiers) for tiers in (mine, theirs))
    differing = differing_buckets(table, other)
    assert [bucket for bucket in range(BUCKETS) if is_in_buckets(bucket << 56, differing)] == [5, 7, 255]
    assert not any(differing_buckets(table, table))
