"""What every engine does, whichever it is: the contract of `worker_agent.port.types`."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from tests.contract.engines import (
    BLOCK_SIZE,
    BLOCKS,
    PROMPT,
    RunEngine,
    failure,
    outputs,
    request,
    rows_until,
    run_engine,
    tokens_of,
)
from tests.support.trtllm import trtllm
from worker_agent.load.reports import load_report
from worker_agent.port.types import EngineStopped, RequestRefused

__all__ = ["run_engine", "trtllm"]


async def test_a_generation_has_its_tokens_and_then_says_length(run_engine: RunEngine) -> None:
    async with run_engine() as running:
        told = await outputs(running.engine, request(max_tokens=6))
    assert len(tokens_of(told)) == 6
    assert [output.finish_reason for output in told] == [None] * (len(told) - 1) + ["length"]


async def test_the_same_prompt_gets_the_same_tokens_and_finds_its_full_blocks_cached(run_engine: RunEngine) -> None:
    async with run_engine() as running:
        first = await outputs(running.engine, request("a"))
        second = await outputs(running.engine, request("b"))
    assert tokens_of(first) == tokens_of(second)
    assert {output.cached_tokens for output in first} == {0}
    for output in second:  # an engine may find a part of the last block, too, but computes one token at least
        assert len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE <= output.cached_tokens < len(PROMPT)


async def test_a_salt_keeps_caches_apart(run_engine: RunEngine) -> None:
    async with run_engine() as running:
        await outputs(running.engine, request("a"))
        told = await outputs(running.engine, request("b", cache_salt="mine"))
    assert told[-1].cached_tokens == 0


async def test_the_stop_token_is_the_last_of_the_tokens(run_engine: RunEngine) -> None:
    async with run_engine() as running:
        free = tokens_of(await outputs(running.engine, request("a", max_tokens=8)))
        end = next(token for token in free[2:] if token not in free[:2])
        told = await outputs(running.engine, request("b", max_tokens=8, stop_token_ids=(end,)))
    assert tokens_of(told) == free[: free.index(end) + 1]
    assert told[-1].finish_reason == "stop"


async def test_generations_side_by_side_get_their_own_tokens(run_engine: RunEngine) -> None:
    prompts = [tuple(range(first, first + 10)) for first in (20, 40, 60)]
    async with run_engine() as running:
        alone = [
            tokens_of(await outputs(running.engine, request(f"one {at}", prompt=prompt)))
            for at, prompt in enumerate(prompts)
        ]
        together = await asyncio.gather(
            *(outputs(running.engine, request(f"all {at}", prompt=prompt)) for at, prompt in enumerate(prompts))
        )
    assert [tokens_of(told) for told in together] == alone


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"max_tokens": 0}, "max_tokens: found 0, allowed 1 or more"),
        ({"prompt": ()}, 'prompt: found "0 tokens", allowed 1 token or more'),
        ({"dp_rank": 1}, r"dp_rank: found 1, allowed one of \(0,\)"),
        ({"max_tokens": 191}, 'max_tokens: found "10 prompt tokens . max_tokens 191", allowed at most 200 together'),
    ],
)
async def test_what_can_never_be_served_is_refused_with_its_field(
    run_engine: RunEngine, fields: dict[str, Any], refusal: str
) -> None:
    async with run_engine() as running:
        with pytest.raises(RequestRefused, match=f"^{refusal}$"):
            await outputs(running.engine, request(**fields))
        assert len(tokens_of(await outputs(running.engine, request()))) == 4


async def test_an_id_in_use_is_refused_and_afterwards_free(run_engine: RunEngine) -> None:
    async with run_engine() as running:
        async with aclosing(running.engine.generate(request(max_tokens=100))) as generation:
            await anext(generation)
            with pytest.raises(RequestRefused, match="request_id"):
                await outputs(running.engine, request())
        assert len(tokens_of(await outputs(running.engine, request()))) == 4


async def test_a_closed_generation_is_computed_no_further_and_holds_nothing(run_engine: RunEngine) -> None:
    async with run_engine() as running:
        async with aclosing(running.engine.generate(request(max_tokens=180))) as generation:
            await anext(generation)
        await outputs(running.engine, request("b", max_tokens=1))
        row = await rows_until(running.engine, lambda row: row["numActiveRequests"] == 0)
    assert row["kvCacheStats"]["usedNumBlocks"] == 0


async def test_events_tell_of_the_pool_and_of_each_full_block(run_engine: RunEngine) -> None:
    async with run_engine() as running:
        (created,) = running.engine.kv_events(5.0)
        await outputs(running.engine, request(max_tokens=1))
        told = [event for event in running.engine.kv_events(5.0) if event["data"]["type"] == "stored"]
    assert (created["event_id"], created["data"]["type"]) == (0, "created")
    blocks = [block for event in told for block in event["data"]["blocks"]]
    assert told[0]["data"]["parent_hash"] is None
    whole = [block for block in blocks if len(block["tokens"]) == BLOCK_SIZE]
    assert [token["token_id"] for block in whole for token in block["tokens"]] == list(PROMPT[:8])


async def test_statistics_make_a_load_report(run_engine: RunEngine) -> None:
    async with run_engine() as running, aclosing(running.engine.generate(request(max_tokens=100))) as generation:
        await anext(generation)
        row = await rows_until(running.engine, lambda row: row["numActiveRequests"] == 1)
    rank, report = load_report(row, "i")
    assert (rank, report.running_requests, report.total_blocks) == (0, 1, BLOCKS)
    assert report.used_blocks >= 3


@pytest.mark.parametrize("poll", ["kv_events", "iteration_stats"])
async def test_a_poll_returns_empty_when_its_time_is_up(run_engine: RunEngine, poll: str) -> None:
    async with run_engine() as running:
        running.engine.kv_events(0)
        assert getattr(running.engine, poll)(0) == []


@pytest.mark.parametrize("poll", ["kv_events", "iteration_stats"])
async def test_a_thread_that_waits_gets_what_comes(run_engine: RunEngine, poll: str) -> None:
    async with run_engine() as running:
        running.engine.kv_events(0)
        async with asyncio.TaskGroup() as group:
            polling = group.create_task(asyncio.to_thread(getattr(running.engine, poll), 60.0))
            await outputs(running.engine, request(max_tokens=1))
    assert len(polling.result()) >= 1


async def test_a_stop_lets_generations_end_within_the_grace(run_engine: RunEngine) -> None:
    async with run_engine() as running:
        async with asyncio.TaskGroup() as group:
            told = group.create_task(outputs(running.engine, request(max_tokens=20)))
            await asyncio.sleep(0)
            await running.engine.stop(60.0)
        assert len(tokens_of(told.result())) == 20
        await running.driving


async def test_a_stop_cuts_what_outlasts_the_grace_and_takes_nothing_new(run_engine: RunEngine) -> None:
    async with run_engine() as running:
        running.freeze()
        async with asyncio.TaskGroup() as group:
            cut = group.create_task(failure(outputs(running.engine, request(max_tokens=150))))
            await asyncio.sleep(0)
            await running.engine.stop(0.0)
        assert isinstance(cut.result(), EngineStopped)
        with pytest.raises(EngineStopped):
            await outputs(running.engine, request("late"))


async def test_cancelling_run_ends_the_generations(run_engine: RunEngine) -> None:
    async with run_engine() as running:
        running.freeze()
        async with asyncio.TaskGroup() as group:
            cut = group.create_task(failure(outputs(running.engine, request(max_tokens=150))))
            await asyncio.sleep(0)
            running.driving.cancel()
        assert isinstance(cut.result(), EngineStopped)
