"""Media in prompts and block hashes: agent, engine events and router compute the same.

    digest       BLAKE3 of the bytes, 64 hex digits; given to the engine as the item's UUID
    mm hash      the digest's first 16 digits, u64; of an identity that is no digest: H(utf8 identity, seed 0)
    key          of each run of an item's tokens and each block that it touches: the digest. One item in two runs, with
                 other tokens between them, has two keys in a block that both touch
    block hash   the tokens, then the mm hashes of the block's keys (`hashing.py`)

Without a UUID an engine hashes decoded pixels, which other processes cannot repeat. With one it keys its cache by UUID
and content together and names the UUID in its events: a wrong UUID costs a cache hit, never correctness.

Source: TensorRT-LLM `batch_manager/blockKey.cpp`, generateBlockHashExtraKeys (overlap, runs; its pull request 13815);
`inputs/multimodal.py`, apply_mm_hashes (BLAKE3 of UUID and content; pull request 11075); `docs/SOURCES.md` E1.3
(`mm_keys`), 3.3 (`extra_keys`), 6.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kv_protocol.hashing import BASE_SEED, local_block_hashes
from kv_protocol.ids import checked_block_size

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_NUMBER_DIGITS = 16


class MmRun(NamedTuple):
    """Tokens `start` to `start + length` of a prompt belong to an item."""

    digest: str
    start: int
    length: int


def is_digest(identity: str) -> bool:
    """Return whether `identity` is spelled as a digest."""
    return _DIGEST.fullmatch(identity) is not None


def mm_hash(identity: str) -> int:
    """Return the multimodal hash (u64) of an item."""
    if is_digest(identity):
        return int(identity[:_NUMBER_DIGITS], 16)
    return xxh3_64_intdigest(identity.encode(), 0)


def expanded(
    prompt: Sequence[int],
    image_token_id: int,
    digests: Sequence[str],
    token_counts: Sequence[int],
    *,
    cached_token_id: int | None = None,
) -> tuple[list[int], list[MmRun]]:
    """Return the prompt with the n-th image token repeated `token_counts[n]` times, and each item's run.

    There are as many of both as the prompt has image tokens; each count is at least 1. Where an engine computes on
    another id than the tokenizer's, `cached_token_id` is what is repeated.
    """
    repeated = image_token_id if cached_token_id is None else cached_token_id
    tokens: list[int] = []
    runs: list[MmRun] = []
    for token in prompt:
        if token == image_token_id:
            at = len(runs)
            runs.append(MmRun(digests[at], len(tokens), token_counts[at]))
            tokens += [repeated] * token_counts[at]
        else:
            tokens.append(token)
    return tokens, runs


def keys_of_blocks(runs: Sequence[MmRun], token_count: int, block_size: int) -> list[list[str]]:
    """Return the keys of each block of a prompt, the last partial one among them, in the order of `runs`."""
    keys: list[list[str]] = [[] for _ in range(-(-token_count // checked_block_size(block_size)))]
    for run in runs:
        end = min(run.start + run.length, token_count)
        for block in range(run.start // block_size, -(-end // block_size)):
            keys[block].append(run.digest)
    return keys


def mm_block_hashes(
    tokens: Sequence[int], runs: Sequence[MmRun], block_size: int, *, seed: int = BASE_SEED, is_eagle: bool = False
) -> list[int]:
    """Return the local hash of each full block of a prompt with media; `chain` makes sequence hashes of them.

    Equal to a mirror's hashes of an engine's event with the same tokens and keys.
    """
    mm_hashes = [list(map(mm_hash, keys)) for keys in keys_of_blocks(runs, len(tokens), block_size)]
    return local_block_hashes(tokens, block_size, seed=seed, mm_hashes=mm_hashes, is_eagle=is_eagle)
