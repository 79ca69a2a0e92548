"""A foreign engine and its consolidator, beside a fleet that serves: one is killed, the other reads too little."""

import asyncio
from pathlib import Path

import pytest

from indexer.follow.checkpoint import RankState
from indexer.service.index_client import IndexClient
from kv_runtime.clock import SystemClock
from tests.system.faults.fleet import READY_S, Fleet, fleet_on_one_server
from tests.system.faults.foreign_engine import FOREIGN, ForeignEngine, foreign_engine, stepping

CONSOLIDATOR_S = 10.0
DROPPED_S = 30.0
QUIET_S = 5.0
_LOOK_S = 0.02
WAITING_MESSAGES_MAX = 50
DROPPED_MESSAGES = 2000
SHORT_RING = 10
"""Less than the engine holds."""


async def start_consolidator(running: Fleet, engine: ForeignEngine) -> None:
    await running.start_consolidator("consolidator", engine.attached(), FOREIGN)


async def state_in(url: str) -> RankState | None:
    async with IndexClient(url, token="", timeout_s=1.0) as index:
        return await index.state(FOREIGN)


async def epochs(running: Fleet) -> list[int]:
    """Return the rank's epoch in every index."""
    states = [await state_in(url) for url in running.indexes.values()]
    return [state.epoch for state in states if state is not None]


async def hashes_in_index(running: Fleet) -> set[int] | None:
    """Return what the index holds of the rank; None while it does not know the rank, as after a long silence."""
    state = await state_in(running.indexes["index"])
    return None if state is None else {block.sequence_hash for chunk in state.chunks for block in chunk.blocks()}


async def until_index_is(running: Fleet, engine: ForeignEngine, within_s: float) -> None:
    """Return once the index held what the engine did at a moment since, no more and no less."""
    loop = asyncio.get_running_loop()
    began_s, first = loop.time(), engine.sequence
    while not (index := await hashes_in_index(running)) or all(
        index != engine.held(steps) for steps in range(first, engine.sequence + 1)
    ):
        if loop.time() - began_s > within_s:
            held = engine.held()
            found = "no blocks" if not index else f"{len(index - held)} ghosts, {len(held - index)} missing"
            raise AssertionError(f"{found} after {within_s} s")
        await SystemClock().sleep(_LOOK_S)


async def test_a_killed_consolidator_comes_back_as_a_new_life_with_all_that_the_engine_holds(tmp_path: Path) -> None:
    async with fleet_on_one_server(tmp_path) as (_, running), foreign_engine() as engine:
        await start_consolidator(running, engine)
        async with running.traffic() as sent, stepping(engine):
            await running.until_equal(READY_S)
            before = await epochs(running)
            await running.kill("consolidator")
            await sent.more()
            await start_consolidator(running, engine)
            await until_index_is(running, engine, CONSOLIDATOR_S)
            await running.until_equal(QUIET_S)
        assert sent.failed == []
        after = await epochs(running)
        assert (len(set(before)), len(set(after)), set(before) & set(after)) == (1, 1, set())
        await until_index_is(running, engine, QUIET_S)
        await running.until_equal(QUIET_S, moved=False)


@pytest.mark.parametrize("ring", [DROPPED_MESSAGES * 2, SHORT_RING])
async def test_what_a_full_socket_dropped_is_replayed_or_else_forgotten(tmp_path: Path, ring: int) -> None:
    async with (
        fleet_on_one_server(tmp_path) as (_, running),
        foreign_engine(ring_max=ring, hwm=WAITING_MESSAGES_MAX) as engine,
    ):
        await start_consolidator(running, engine)
        async with running.traffic() as sent:
            async with stepping(engine):
                await running.until_equal(READY_S)
                before = await running.scrape("consolidator")
            running.processes["consolidator"].freeze()
            for _ in range(DROPPED_MESSAGES):
                await engine.step()
            running.processes["consolidator"].thaw()
            async with stepping(engine):
                await until_index_is(running, engine, DROPPED_S)
                await running.until_equal(QUIET_S)
        assert sent.failed == []
        after, is_healed = await running.scrape("consolidator"), ring > SHORT_RING
        assert after.total("zmq_gaps_total") > before.total("zmq_gaps_total")
        assert after.total("zmq_replays_total") > before.total("zmq_replays_total")
        assert after.total("zmq_lost_total") - before.total("zmq_lost_total") == (0 if is_healed else 1)
        await until_index_is(running, engine, QUIET_S)
        await running.until_equal(QUIET_S, moved=False)
