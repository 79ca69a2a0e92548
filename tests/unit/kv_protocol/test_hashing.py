from array import array
from collections.abc import Sequence

import pytest

from kv_protocol.digest import BUCKETS, SetDigest, TierDigest, bucket_table, differing_buckets, is_in_buckets
from kv_protocol.errors import LimitExceeded
from kv_protocol.events import Tier
from kv_protocol.hashing import (
    canary,
    hash_seed,
    local_block_hashes,
    pack_tokens,
    sequence_hashes,
    to_i64,
    to_u64,
    unpack_tokens,
)
from kv_protocol.splitmix import splitmix64

IMAGE = 7


def test_what_is_no_token_block_size_or_multimodal_hash_is_refused() -> None:
    for token in (-1, 2**32, 2**64, 1.0, None, "1"):
        with pytest.raises(LimitExceeded, match=r"^token id: "):
            sequence_hashes([1, 2, 3, token], 4)  # type: ignore[list-item]
    for block_size in (0, -1, 4097):
        with pytest.raises(LimitExceeded, match=rf"^block_size: found {block_size}"):
            local_block_hashes([1, 2, 3], block_size)
    for mm_hash in (-1, 2**64):
        with pytest.raises(LimitExceeded, match=r"^hash: "):
            local_block_hashes([1], 1, mm_hashes=[[3, mm_hash]])


@pytest.mark.parametrize("make", [bytes, bytearray, list, tuple, lambda tokens: array("B", tokens), memoryview])
def test_tokens_hash_alike_in_whatever_they_come(make: type[Sequence[int]]) -> None:
    tokens = make(b"eight by")  # type: ignore[call-arg]
    assert pack_tokens(tokens) == b"".join(token.to_bytes(4, "little") for token in b"eight by")
    assert sequence_hashes(tokens, 4) == sequence_hashes([101, 105, 103, 104, 116, 32, 98, 121], 4)


def test_packed_tokens_are_read_back() -> None:
    for tokens in ([], [0], [1, 2**32 - 1, 0x01020304]):
        assert unpack_tokens(pack_tokens(tokens)) == tokens


@pytest.mark.parametrize(("is_eagle", "counts"), [(False, [0, 0, 1, 1, 2]), (True, [0, 0, 0, 1, 1])])
def test_only_full_blocks_have_a_hash(is_eagle: bool, counts: list[int]) -> None:
    assert [len(local_block_hashes(range(n), 2, is_eagle=is_eagle)) for n in range(5)] == counts


def test_an_empty_name_or_salt_is_an_absent_one() -> None:
    assert {hash_seed(), hash_seed("", ""), hash_seed(None, ""), hash_seed("", None)} == {1337}


def test_a_name_and_a_salt_of_the_same_text_give_different_seeds_and_add_up() -> None:
    name, salt = hash_seed("x", None), hash_seed(None, "x")
    assert name != salt
    assert hash_seed("x", "x") == (name + salt - 1337) % 2**64


def test_the_canary_is_the_second_block_of_counting_tokens() -> None:
    for block_size in (1, 16, 4096):
        assert [canary(block_size)] == sequence_hashes(range(2 * block_size), block_size)[1:]


def test_signed_and_unsigned_keep_the_same_bits() -> None:
    for value in (0, 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -1, -(2**63)):
        assert -(2**63) <= to_i64(value) < 2**63
        assert to_u64(to_i64(value)) == to_u64(value) == value % 2**64


HASHES = [0, 1, 2**56 - 1, 2**56, 2**63, 2**64 - 1]


def test_a_heartbeat_says_count_and_digest_of_a_tier() -> None:
    assert SetDigest([1]).of_tier(Tier.DISK) == TierDigest(Tier.DISK, 1, splitmix64(1))


def test_two_tables_differ_in_the_buckets_of_the_blocks_that_only_one_has_on_a_tier() -> None:
    mine = [SetDigest(HASHES), SetDigest(), SetDigest([5 << 56]), SetDigest()]
    theirs = [SetDigest(HASHES[:-1]), SetDigest(), SetDigest(), SetDigest([7 << 56])]
    table, other = (bucket_table(digest.buckets for digest in tiers) for tiers in (mine, theirs))
    differing = differing_buckets(table, other)
    assert [bucket for bucket in range(BUCKETS) if is_in_buckets(bucket << 56, differing)] == [5, 7, 255]
    assert not any(differing_buckets(table, table))
