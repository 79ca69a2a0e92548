import pytest

from kv_protocol.digest import BUCKETS, SetDigest, TierDigest, bucket_table, differing_buckets, is_in_buckets
from kv_protocol.errors import LimitExceeded
from kv_protocol.events import Tier
from kv_protocol.splitmix import choice_index, splitmix64, unit_interval

HASHES = [0, 1, 2**56 - 1, 2**56, 2**63, 2**64 - 1]


@pytest.mark.parametrize("sequence_hash", HASHES)
def test_one_block_counts_in_the_bucket_of_its_top_byte_alone(sequence_hash: int) -> None:
    digest = SetDigest([sequence_hash])
    expected = [0] * BUCKETS
    expected[sequence_hash // 2**56] = splitmix64(sequence_hash)
    assert digest.buckets == tuple(expected)
    assert (digest.block_count, digest.total) == (1, splitmix64(sequence_hash))


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


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("count", [1, 2, 3, 64, 1000])
def test_a_seeded_choice_is_an_index_and_always_the_same(seed: int, count: int) -> None:
    drawn = [choice_index(seed, count, draw) for draw in range(50)]
    assert set(drawn) <= set(range(count))
    assert drawn == [choice_index(seed, count, draw) for draw in range(50)]
    assert all(0.0 <= unit_interval(seed, draw) < 1.0 for draw in range(50))


def test_choices_of_many_seeds_are_even() -> None:
    drawn = [choice_index(seed, 4) for seed in range(4000)]
    assert all(900 < drawn.count(index) < 1100 for index in range(4))


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
