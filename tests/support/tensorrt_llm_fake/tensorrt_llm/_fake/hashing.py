"""Engine block hashes, for events: opaque to their readers.

`v2_sha256` is 64 hex digits, `v2_sha256_64` and `v1_block_key` are numbers: its first eight bytes, big-endian.
"""

import hashlib


def block_hash(
    algorithm: str,
    tokens: tuple[int, ...],
    parent: int | str | None,
    extras: tuple[int, ...] = (),
    salt: int | None = None,
) -> int | str:
    """Return a block's hash; `parent` is that of the block before it, `salt` counts for first blocks alone."""
    told = f"{parent}|{tokens}|{extras}|{salt if parent is None else None}"
    digest = hashlib.sha256(told.encode())
    return digest.hexdigest() if algorithm == "v2_sha256" else int.from_bytes(digest.digest()[:8], "big")


def number_of(text: str) -> int:
    """Return a salt's or a media item's number: the first eight bytes of its SHA-256, little-endian."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
