"""Identities of multimodal items, as engines spell them: `kv_protocol/mm_keys.py` has the rule."""

from kv_protocol.mm_keys import is_digest, mm_hash

__all__ = ["is_digest", "mm_hash"]
