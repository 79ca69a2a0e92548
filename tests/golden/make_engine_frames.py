"""Records lives of engines' caches in their own event classes: `python -m tests.golden.make_engine_frames`.

It needs the engines' files (`make engines`). A recorded life is `EngineFrames`; of every release there are `SEEDS`.
"""

import gzip
from random import Random

import msgspec

from tests.support.engine_lives import STEPS, life_of
from tests.support.engine_wheels import FILES, modules
from tests.support.paths import RECORDINGS

RECORDED = RECORDINGS / "engine_frames.msgpack.gz"
SEEDS = 12


class EngineFrame(msgspec.Struct, array_like=True):
    """A payload of a rank; `begins_anew`: its engine restarted before."""

    dp_rank: int
    begins_anew: bool
    payload: bytes


class EngineFrames(msgspec.Struct):
    """One life: its frames, and what each rank's cache holds at the end: sequence hash -> bits of tiers."""

    release: str
    seed: int
    block_size: int
    is_eagle: bool
    frames: list[EngineFrame]
    held: list[dict[int, int]]


def _recorded(release: str, seed: int) -> EngineFrames:
    read = modules(release)
    life, restart_at = life_of(release, seed, read), Random(seed).choice([None, STEPS // 2])
    frames = []
    for step in range(STEPS):
        if step == restart_at:
            life.begin_anew()
        for rank in range(life.ranks):
            batch = read["kv_events"].KVEventBatch(1.5, life.step(rank), rank)
            frames.append(EngineFrame(rank, step == restart_at, msgspec.msgpack.encode(batch)))
    held = [life.held(rank) for rank in range(life.ranks)]
    return EngineFrames(release, seed, life.block_size, life.lookahead > 0, frames, held)


def read() -> list[EngineFrames]:
    """Return the recorded lives."""
    return msgspec.msgpack.decode(gzip.decompress(RECORDED.read_bytes()), type=list[EngineFrames])


if __name__ == "__main__":
    lives = [_recorded(release, seed) for release in FILES for seed in range(SEEDS)]
    RECORDED.write_bytes(gzip.compress(msgspec.msgpack.encode(lives), mtime=0))
