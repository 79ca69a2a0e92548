"""Engine block hashes, for events.

`v1_block_key`: the published arithmetic (`docs/SOURCES.md` E1.6), which a test holds against the numbers of
TensorRT-LLM#18156. How salts and multimodal keys are mixed in is not published in full; here they are mixed like a LoRA
id, which is enough for hashes that are opaque to their readers. `v2_sha256` is 64 hex digits, `v2_sha256_64` its
first eight bytes, big-endian.
"""

import hashlib

M64 = 2**64 - 1
M32 = 2**32 - 1


def block_hash(
    algorithm: str,
    tokens: tuple[int, ...],
    parent: int | str | None,
    extras: tuple[int, ...] = (),
    salt: int | None = None,
) -> int | str:
    """Return a block's hash; `parent` is that of the block before it, `salt` counts for first blocks alone."""
    if algorithm == "v1_block_key":
        return _v1(tokens, int(parent or 0), extras, salt)
    told = f"{parent}|{tokens}|{extras}|{salt if parent is None else None}"
    digest = hashlib.sha256(told.encode())
    return digest.hexdigest() if algorithm == "v2_sha256" else int.from_bytes(digest.digest()[:8], "big")


def number_of(text: str) -> int:
    """Return a salt's or a media item's number: the first eight bytes of its SHA-256, little-endian."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _v1(tokens: tuple[int, ...], parent: int, extras: tuple[int, ...], salt: int | None) -> int:
    seed = len(tokens) ^ (parent * 0xBF58476D1CE4E5B9 & M64)
    if parent == 0 and salt is not None:
        seed = _mix64(salt, seed)
    for token in tokens:
        seed = _mix32(token, seed)
    for extra in extras:
        seed = _mix64(extra, seed)
    return seed


def _mix32(value: int, seed: int) -> int:
    value &= M32
    for _ in range(2):
        value = ((value >> 16) ^ value) * 0x45D9F3B & M32
    value = ((value >> 16) ^ value) + 0x9E3779B9 & M32
    return (seed ^ (value + (seed << 6) + (seed >> 2))) & M64


def _mix64(value: int, seed: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & M64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & M64
    value ^= value >> 31
    return (seed ^ (value + 0x9E3779B9 + (seed << 6) + (seed >> 2))) & M64
