"""Every vector made by the field's strongest peer gives the same number here.

Source of the vectors: `meta` in `hash_vectors.json`; of the formulas: `docs/SOURCES.md` E6.
"""

import json
from typing import Any

from kv_protocol import hashing
from tests.support.paths import RECORDINGS

Vector = dict[str, Any]

VECTORS: dict[str, list[Vector]] = json.loads((RECORDINGS / "hash_vectors.json").read_bytes())


def local_hashes(vector: Vector) -> list[int]:
    """Return our local block hashes of what a vector describes, in any of the spellings that the groups use."""
    infos = vector.get("block_mm_infos") or []
    return hashing.local_block_hashes(
        vector["tokens"],
        vector["kv_block_size"],
        seed=hashing.hash_seed(vector["lora_name"], vector["cache_namespace"]),
        mm_hashes=[[item["mm_hash"] for item in info["mm_objects"]] if info else [] for info in infos],
        is_eagle=bool(vector.get("is_eagle")),
    )


def test_local_block_hashes_equal_the_peers() -> None:
    for vector in VECTORS["block_hash_vectors"]:
        found = local_hashes(vector)
        assert found == vector["block_hashes_u64"], vector.get("name")
        assert [f"{value:016x}" for value in found] == vector["block_hashes_hex"], vector.get("name")
        assert [hashing.to_i64(value) for value in found] == vector["block_hashes_i64"], vector.get("name")


def test_sequence_hashes_equal_the_peers() -> None:
    for vector in VECTORS["sequence_hash_vectors"]:
        namespace = {"lora_name": vector["lora_name"], "cache_salt": vector["cache_namespace"]}
        found = hashing.sequence_hashes(vector["tokens"], vector["kv_block_size"], **namespace)
        assert local_hashes(vector) == vector["block_hashes_u64"], vector
        assert found == vector["sequence_hashes_u64"], vector


def test_the_pads_of_images_equal_the_peers() -> None:
    for vector in VECTORS["pad_value_vectors"]:
        assert hashing.image_pad(vector["mm_hash"]) == vector["pad_value"], vector


def test_a_block_with_images_hashes_as_the_peers() -> None:
    for vector in VECTORS["pad_value_relay_vectors"]:
        tokens, images = vector["tokens"], vector["mm_hashes"] or []
        padded = vector["hashed_tokens"] or tokens
        appended = [images] if vector["image_token_id"] not in tokens else []  # rule 6: images without an image token
        assert hashing.local_block_hashes(padded, len(padded), mm_hashes=appended) == [vector["tokens_hash"]], vector


def test_the_same_bits_read_as_i64_and_as_u64() -> None:
    for vector in VECTORS["i64_vectors"]:
        assert hashing.to_i64(vector["u64"]) == vector["i64"], vector
        assert hashing.to_u64(vector["i64"]) == vector["u64"], vector
