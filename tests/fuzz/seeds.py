"""The seed inputs of the fuzzers.

    apply_batch   limits u8, then operations; here: messages as they come (op 0), random programs, and stores without a
                  removal until a small memory limit is reached
    restore       limits u8, then the body of a snapshot

They contain events of ranks that share few prompts, with holes, restarts and unknown parents.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

from indexer.index.snapshot import unseal
from kv_protocol.codec import encode_message
from kv_protocol.events import TIERS, Batch, Cleared, Event, Removed, Stored
from kv_protocol.splitmix import splitmix64
from tests.reference.index.index import ReferenceIndex

FUZZERS = ("apply_batch", "restore")
_INPUTS = 60
_RANKS = 4
_STORES_PER_UNKNOWN_PARENT = 6
_PROMPTS = 5
_CHAIN_BLOCKS = 24
_PIECE_BLOCKS_MAX = 8
_MESSAGE, _STORE, _ADD_RANK, _OPERATIONS = 0, 4, 11, 16
"""Operations of `fuzz_apply_batch.cpp`, and how many there are."""
_LITTLE_MEMORY = 2 << 2
"""In the byte of limits: memory for a few blocks."""
_STORED_BLOCKS_MAX = 31


def _event(draw: Random) -> Event:
    """Return an event on a part of one of a few chains; each chain forks from the one before."""
    prompt = draw.randrange(_PROMPTS)
    chain = [splitmix64(at if at < 4 * prompt else 100 * prompt + at) for at in range(_CHAIN_BLOCKS)]
    start = draw.choice([0, 0, draw.randrange(_CHAIN_BLOCKS)])
    piece = tuple(chain[start : start + draw.randint(1, _PIECE_BLOCKS_MAX)])
    tier = draw.choice((TIERS[0], *TIERS))
    kind = draw.choices((Stored, Removed, Cleared), (14, 5, 1))[0]
    if kind is Cleared:
        return Cleared(tier)
    if kind is Removed:
        return Removed(piece, tier)
    parent = (
        chain[start - 1]
        if draw.randrange(_STORES_PER_UNKNOWN_PARENT)
        else splitmix64(10_000 + draw.randrange(_PROMPTS))
    )
    return Stored(piece, parent if start else None, start, tier)


def _messages(draw: Random) -> Iterator[tuple[int, bytes]]:
    """Yield ranks and messages."""
    for seq in range(1, draw.randint(2, 9)):
        batches = [Batch(1, seq, _event(draw)) for _ in range(draw.randint(1, 2))]
        yield draw.randrange(_RANKS), encode_message(batches)


def _apply_batch_input(draw: Random) -> bytes:
    program = bytearray([draw.choice([0, 2, 3, draw.randrange(16)])])
    for rank in range(_RANKS):
        program += bytes([_ADD_RANK, rank, 1])
    for rank, message in _messages(draw):
        program += bytes([_MESSAGE, rank]) + len(message).to_bytes(2, "little") + message
        if draw.choice((True, False)):
            program += bytes([draw.randrange(1, _OPERATIONS), draw.randrange(_RANKS)]) + draw.randbytes(6)
    return bytes(program)


def _program_input(draw: Random) -> bytes:
    return bytes([draw.randrange(16)]) + draw.randbytes(draw.choice([40, 200, 600]))


def _filling_input(draw: Random) -> bytes:
    program = bytearray([_LITTLE_MEMORY | draw.randrange(4)])
    for first in range(0, 8 * _STORED_BLOCKS_MAX, _STORED_BLOCKS_MAX):
        program += bytes([_STORE, 0, _STORED_BLOCKS_MAX << 3, first])
    for _ in range(draw.choice([20, 200])):
        program += bytes([_STORE, draw.randrange(2), 1 << 3 | draw.randrange(len(TIERS)) << 1, draw.randrange(255)])
    return bytes(program)


def _restore_input(draw: Random) -> bytes:
    index = ReferenceIndex()
    for rank in range(_RANKS):
        index.register(rank)
    for rank, message in _messages(draw):
        index.apply_batch(rank, message, 0.0)
    return bytes([draw.randrange(4)]) + bytes(unseal(index.snapshot()))


_MAKERS = {"apply_batch": (_apply_batch_input, _program_input, _filling_input), "restore": (_restore_input,)}


def inputs(fuzzer: str) -> list[bytes]:
    """Return the inputs of one fuzzer; deterministic."""
    makers = _MAKERS[fuzzer]
    return [makers[seed % len(makers)](Random(seed)) for seed in range(_INPUTS)]


def write(directory: Path) -> None:
    """Write a directory of inputs for each fuzzer."""
    for fuzzer in FUZZERS:
        (directory / fuzzer).mkdir(parents=True, exist_ok=True)
        for seed, data in enumerate(inputs(fuzzer)):
            (directory / fuzzer / f"{seed:03}").write_bytes(data)
