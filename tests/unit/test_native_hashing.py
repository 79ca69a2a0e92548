"""Hashes of whole prompts: the extension's, and those of the `xxhash` package where it was built without the header."""

import json
from collections.abc import Callable
from random import Random
from threading import Thread
from typing import Any

import pytest

from indexer.native import core
from indexer.native.index import hash_blocks, hash_by_package
from kv_protocol.codec import pack_u64, unpack_u64
from kv_protocol.errors import LimitExceeded
from kv_protocol.hashing import (
    BASE_SEED,
    EAGLE_HASH_SCHEME,
    HASH_SCHEME,
    Hashing,
    chain,
    hash_seed,
    local_block_hashes,
    pack_tokens,
    sequence_hashes,
)
from kv_protocol.ids import BLOCK_SIZE_MAX
from tests.support.paths import RECORDINGS

VECTORS: list[dict[str, Any]] = json.loads((RECORDINGS / "hash_vectors.json").read_bytes())["sequence_hash_vectors"]
TOKEN_MAX = 2**32 - 1
LONG = 100_000
"""Tokens of a prompt during which the extension lets other threads run."""


Hash = Callable[..., tuple[int, bytes, float]]


@pytest.fixture(params=["native", "package"])
def hashed(request: pytest.FixtureRequest) -> Hash:
    """Both are asked every question."""
    if request.param == "package":
        return hash_by_package
    if not core.HAS_XXHASH:
        pytest.skip("the extension was built without xxhash's header")
    return hash_blocks


def hashing(block_size: int, *, is_eagle: bool = False) -> Hashing:
    return Hashing(block_size, EAGLE_HASH_SCHEME if is_eagle else HASH_SCHEME)


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_the_hashes_equal_the_peers(vector: dict[str, Any], hashed: Hash) -> None:
    seed = hash_seed(vector["lora_name"], vector["cache_namespace"])
    count, found, seconds = hashed(pack_tokens(vector["tokens"]), hashing(vector["kv_block_size"]), seed)
    assert list(unpack_u64(found)) == vector["sequence_hashes_u64"]
    assert count == len(vector["tokens"])
    assert 0 <= seconds < 1


def test_the_hashes_of_any_prompt_are_the_protocols(hashed: Hash) -> None:
    for seed in range(200):
        draw = Random(seed)
        block_size = draw.choice([1, 2, 3, 16, 31, 32, 64, 128, BLOCK_SIZE_MAX])
        tokens = [draw.randint(0, TOKEN_MAX) for _ in range(draw.choice([0, 1, block_size, draw.randrange(600)]))]
        salt, is_eagle = draw.choice([None, "a", "salt"]), draw.random() < 0.5
        expected = sequence_hashes(tokens, block_size, cache_salt=salt, is_eagle=is_eagle)
        found = hashed(pack_tokens(tokens), hashing(block_size, is_eagle=is_eagle), hash_seed(None, salt))[1]
        assert list(unpack_u64(found)) == expected, f"seed {seed}"


@pytest.mark.parametrize("is_eagle", [False, True])
@pytest.mark.parametrize("most", [0xFF, 0xFFFF, 0x10FFFF])
def test_strings_are_the_code_points_of_their_characters(most: int, is_eagle: bool, hashed: Hash) -> None:
    tokens = [most - at for at in range(256)]
    text = "".join(map(chr, tokens))
    count, found, _ = hashed(("", text[:100], text[100:101], text[101:], ""), hashing(64, is_eagle=is_eagle), 7)
    assert count == len(tokens)
    assert found == pack_u64(chain(local_block_hashes(tokens, 64, seed=7, is_eagle=is_eagle)))


@pytest.mark.parametrize("is_eagle", [False, True])
def test_only_full_windows_have_a_hash(is_eagle: bool, hashed: Hash) -> None:
    full, blocks = 3 * 16 + is_eagle, hashing(16, is_eagle=is_eagle)
    counts = [len(hashed(bytes(4 * tokens), blocks, BASE_SEED)[1]) // 8 for tokens in (0, full - 1, full)]
    assert counts == [0, 2, 3]


@pytest.mark.parametrize("block_size", [0, -1, BLOCK_SIZE_MAX + 1, 2**63, 2**64])
def test_a_block_has_a_size(block_size: int, hashed: Hash) -> None:
    with pytest.raises(LimitExceeded, match="block_size"):
        hashed(bytes(12), hashing(block_size), BASE_SEED)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_is_a_u64(seed: int, hashed: Hash) -> None:
    with pytest.raises(LimitExceeded, match="seed"):
        hashed(bytes(12), hashing(1), seed)


def test_bytes_are_whole_u32s(hashed: Hash) -> None:
    with pytest.raises(LimitExceeded, match="tokens: found '11 bytes'"):
        hashed(bytes(11), hashing(1), BASE_SEED)


def test_several_threads_may_hash_at_once(hashed: Hash) -> None:
    prompts = [range(first, first + LONG) for first in range(4)]
    packed, found = list(map(pack_tokens, prompts)), [b""] * len(prompts)

    def hash_one(at: int) -> None:
        found[at] = hashed(packed[at], hashing(16), BASE_SEED)[1]

    threads = [Thread(target=hash_one, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [pack_u64(sequence_hashes(prompt, 16)) for prompt in prompts]
