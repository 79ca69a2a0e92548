"""Block hashes, equal to NVIDIA Dynamo's, so that its users can migrate and verify ours.

    seed S          = 1337 + the sum of H(utf8(text), i) over the fields i of a `Namespace` that are not empty
    local hash L_i  = H(le32 tokens of block i ++ le64 of its multimodal hashes in ascending order, S)
    sequence hash   : S_0 = L_0;  S_i = H(le64 S_{i-1} ++ le64 L_i, 1337)      H = XXH3-64, all mod 2^64

Only full blocks have a hash. Source: `docs/SOURCES.md` E6; vectors in `tests/golden/hash_vectors.json`.

Media in prompts, hashed alike by the router and by the agent that reads engine events:

    digest       BLAKE3 of the bytes, 64 hex digits; given to the engine as the item's UUID
    mm hash      the digest's first 16 digits, u64; if the UUID is no digest: H(utf8 UUID, seed 0)
    key          the digest; each run of an item's tokens gives one key to each block that it touches. So an item in two
                 runs, with other tokens between them, gives two keys to a block that both touch
    block hash   the tokens, then the mm hashes of the block's keys

Without a UUID an engine hashes decoded pixels, which other processes cannot repeat. With one it keys its cache by UUID
and content together and names the UUID in its events: a wrong UUID costs a cache hit, never correctness.

Source: TensorRT-LLM `batch_manager/blockKey.cpp`, generateBlockHashExtraKeys (overlap, runs; its pull request 13815);
`inputs/multimodal.py`, apply_mm_hashes (BLAKE3 of UUID and content; pull request 11075); `docs/SOURCES.md` E1.3
(`mm_keys`), 3.3 (`extra_keys`), 6.
"""

import re
import struct
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kv_protocol.codec import pack_u64
from kv_protocol.errors import LimitExceeded
from kv_protocol.ids import checked_block_size
from kv_protocol.splitmix import U64_MASK

HASH_SCHEME = "xxh3-1337"
"""Name of the rules above, stated by a worker at registration and compared by the router."""
EAGLE_HASH_SCHEME = "xxh3-1337-eagle"
"""The same rules with windows of a block and one token: engines that draft with EAGLE key their caches by bigrams."""
HASH_SCHEMES = (HASH_SCHEME, EAGLE_HASH_SCHEME)
TEXT_SCHEME = "text"
"""Name of hashes over a prompt's text, with four bytes in place of each token. No worker states this scheme, so the
overlap of a rank is estimated from the requests that were routed to it."""
BASE_SEED = 1337
_PAIR = struct.Struct("<QQ")
_PAD_BASE = 1_000_000
_PAD_MASK = (1 << 30) - 1
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_NUMBER_DIGITS = 16


class Hashing(NamedTuple):
    """How the prompts of a model are hashed: tokens in a block, and the name of the rules."""

    block_size: int
    scheme: str = HASH_SCHEME

    @property
    def is_eagle(self) -> bool:
        """Whether a window has one token more than a block."""
        return self.scheme == EAGLE_HASH_SCHEME


class Namespace(NamedTuple):
    """The texts in a block's hash beside its tokens; None or empty: absent. `hash_seed` also hashes a field's index."""

    lora_name: str | None = None
    cache_salt: str | None = None

    def below(self, above: "Namespace") -> "Namespace":
        """Return this namespace, completed with the texts of `above`, the namespace of its parent block."""
        return Namespace(*[own or inherited for own, inherited in zip(self, above, strict=True)])


@lru_cache(4096)
def hash_seed(*namespace: str | None) -> int:
    """Return the seed of local hashes in the `Namespace` with these fields, in their order."""
    return BASE_SEED + sum(xxh3_64_intdigest(text.encode(), at) for at, text in enumerate(namespace) if text) & U64_MASK


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian u32s; raise `LimitExceeded` if one is not a u32."""
    try:
        numbers = list(tokens) if isinstance(tokens, bytes | bytearray) else tokens  # array() reads bytes as memory
        return array("I", numbers).tobytes()
    except (OverflowError, TypeError) as error:
        raise LimitExceeded("token id", str(error), "u32") from error


def unpack_tokens(data: bytes) -> list[int]:
    """Return the little-endian u32 token ids in `data`, whose length is a multiple of 4."""
    unpacked = array("I")
    unpacked.frombytes(data)
    return unpacked.tolist()


def local_block_hashes(
    tokens: Sequence[int],
    block_size: int,
    *,
    seed: int = BASE_SEED,
    mm_hashes: Sequence[Sequence[int]] = (),
    is_eagle: bool = False,
) -> list[int]:
    """Return one hash per full block of `tokens`, which does not depend on the blocks before it.

    `mm_hashes[i]` are the multimodal hashes (u64) of block i; a shorter or longer list is fine. With `is_eagle` a
    window has one token more than the stride, so the first hash needs `block_size + 1` tokens.
    """
    width = 4 * (checked_block_size(block_size) + is_eagle)
    data = pack_tokens(tokens)
    hashes = []
    for index, at in enumerate(range(0, len(data) - width + 1, 4 * block_size)):
        window = data[at : at + width]
        if index < len(mm_hashes) and mm_hashes[index]:
            window += pack_u64(sorted(mm_hashes[index]))
        hashes.append(xxh3_64_intdigest(window, seed))
    return hashes


def chain(local_hashes: Iterable[int], parent: int | None = None) -> list[int]:
    """Return the sequence hashes of blocks that follow `parent` (None: that begin a sequence)."""
    pack, digest = _PAIR.pack, xxh3_64_intdigest
    hashes = []
    for local in local_hashes:
        parent = local if parent is None else digest(pack(parent, local), BASE_SEED)
        hashes.append(parent)
    return hashes


def sequence_hashes(
    tokens: Sequence[int],
    block_size: int,
    *,
    is_eagle: bool = False,
    **namespace: str | None,
) -> list[int]:
    """Return the sequence hash of each full block of a text-only prompt; `namespace`: the fields of a `Namespace`."""
    seed = hash_seed(*Namespace(**namespace))
    return chain(local_block_hashes(tokens, block_size, seed=seed, is_eagle=is_eagle))


def canary(block_size: int, scheme: str = HASH_SCHEME) -> int:
    """Return the last sequence hash of the first 2 blocks of 0, 1, 2 ...: both sides compare it at registration."""
    is_eagle = Hashing(block_size, scheme).is_eagle
    return sequence_hashes(range(2 * block_size + is_eagle), block_size, is_eagle=is_eagle)[-1]


def image_pad(mm_hash: int) -> int:
    """Return the token id that stands for an image's tokens. Source: `docs/SOURCES.md` E6, rule 6."""
    return _PAD_BASE + (mm_hash & _PAD_MASK)


def to_i64(value: int) -> int:
    """Return the i64 with the bits of `value` mod 2^64."""
    value &= U64_MASK
    return value - (1 << 64) if value >> 63 else value


def to_u64(value: int) -> int:
    """Return the u64 with the bits of `value` mod 2^64."""
    return value & U64_MASK


class MmRun(NamedTuple):
    """A run of an item's tokens in a prompt: `length` tokens from index `start`."""

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

    `digests` and `token_counts` have one item for each image token of the prompt; each count is at least 1. If an
    engine computes with another id than the tokenizer's, that `cached_token_id` is repeated.
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
    """Return the keys of each block of a prompt, the last partial one included, in the order of `runs`."""
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

    The mirror (`worker_agent/events/mirror.py`) computes the same for an engine's event with these tokens and keys.
    """
    mm_hashes = [list(map(mm_hash, keys)) for keys in keys_of_blocks(runs, len(tokens), block_size)]
    return local_block_hashes(tokens, block_size, seed=seed, mm_hashes=mm_hashes, is_eagle=is_eagle)
