"""Identities of multimodal items, as engines spell them, become the u64 that block hashes are made with.

    64 hex digits   a digest: its first 16 digits are the number
    anything else   the caller's own name of the item: H(utf8 name, seed 0)

Source: `event_plane.md` sections 1.3 (`mm_keys`), 3.3 (`extra_keys`).
"""

import re

from xxhash import xxh3_64_intdigest

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_NUMBER_DIGITS = 16


def is_digest(identity: str) -> bool:
    """Return whether `identity` is spelled as a digest."""
    return _DIGEST.fullmatch(identity) is not None


def mm_hash(identity: str) -> int:
    """Return the multimodal hash (u64) of an item."""
    if is_digest(identity):
        return int(identity[:_NUMBER_DIGITS], 16)
    return xxh3_64_intdigest(identity.encode(), 0)
