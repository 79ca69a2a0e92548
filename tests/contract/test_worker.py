"""What every whole worker does, whatever its kind: the same assertions for all, on a real event log.

Role by role: `test_worker_roles.py`. In `tests/system/e2e/`, with images: `test_worker_images.py`; behind a router:
`test_worker_routed.py`.
"""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kv_protocol.fleet import Heartbeat, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.hashing import HASH_SCHEME, canary
from kv_runtime.text.loading import load_text
from tests.contract import workers
from tests.contract.worker_kinds import KINDS, kinds_with
from tests.contract.workers import PROMPT_BLOCKS, Ground, Worker, comes, ground
from tests.system.integration.agent_http import CHAT, COMPLETIONS
from worker_agent.events.consolidation import Consolidation

__all__ = ["ground"]

TOKENS = 12
EVERY_WORKER_SHOWS = {
    "kvrouter_engine_running_requests", "kvrouter_engine_waiting_requests", "kvrouter_engine_used_blocks",
    "kvrouter_engine_total_blocks", "kvrouter_mirror_blocks", "kvrouter_publish_failures_total",
    "kvrouter_hop_a_events_total", "kvrouter_log_connected",
}  # fmt: skip


@pytest.fixture(scope="module", params=kinds_with("aggregated"))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def worker(ground: Ground, kind: str) -> AsyncIterator[Worker]:
    """An aggregated worker."""
    async with KINDS[kind].start(ground, "aggregated", f"one-{kind}") as running:
        yield running


def chat(worker: Worker) -> dict[str, Any]:
    """Return a chat with a beginning that no earlier request had."""
    return {"messages": [{"role": "user", "content": bytes(worker.fresh_prompt()).decode()}]}


# ----------------------------------------------------------------------------------------------------- registered
@pytest.mark.asyncio(loop_scope="module")
async def test_it_is_in_the_fleet_as_what_it_is(worker: Worker, kind: str) -> None:
    said, stated = worker.registration, KINDS[kind]
    text, sizes = load_text(stated.text), (said.total_kv_blocks, said.max_seq_len)
    batch = (said.max_num_seqs, said.max_num_batched_tokens)
    assert (said.worker_id, said.model, said.role) == (worker.worker_id, worker.model, "aggregated")
    assert worker.model in said.served_names
    assert said.dp_ranks == tuple(range(stated.ranks))
    assert all(sizes), "those that every engine tells"
    assert (batch[0] > 0) == stated.tells_batch
    assert (*sizes, *batch) == (stated.sizes or (*sizes, *batch))
    assert (said.hash_scheme, said.canary) == (HASH_SCHEME, canary(said.block_size))
    assert (said.tokenizer_digest, said.template_digest) == (text.tokenizer_digest, text.template_digest)
    assert said.endpoint == "dynamo.backend.generate"
    assert said.event_source != "none"
    assert said.accepts_token_ids == stated.takes_prompt_ids


@pytest.mark.asyncio(loop_scope="module")
async def test_every_rank_has_a_pulse_of_this_life(worker: Worker) -> None:
    beats = worker.ground.heard.beats
    await comes(lambda: all(rank in beats for rank in worker.ranks), "a pulse of every rank")
    assert {beats[rank].instance for rank in worker.ranks} == {worker.registration.instance}


@pytest.mark.asyncio(loop_scope="module")
async def test_its_figures_have_what_those_of_every_worker_have(worker: Worker, kind: str) -> None:
    assert (await worker.ask(COMPLETIONS, {"prompt": worker.fresh_prompt(), "max_tokens": 2})).status == 200
    await comes(worker.loads, "a load report")
    shown = {sample.partition("{")[0] for sample in await worker.figures()}
    assert EVERY_WORKER_SHOWS - shown == set()
    assert ("trtllm_request_success_total" in shown) == (kind == "trtllm"), "the engine's own"


# ------------------------------------------------------------------------------------------------------- requests
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_is_the_same_streamed_and_whole(worker: Worker, path: str) -> None:
    asked = chat(worker) if path == CHAT else {"prompt": worker.fresh_prompt()}
    asked |= {"max_tokens": TOKENS}
    whole = await worker.ask(path, asked)
    streamed = await worker.ask(path, asked | {"stream": True, "stream_options": {"include_usage": True}})
    assert (whole.status, streamed.status) == (200, 200), whole.data + streamed.data
    assert streamed.events[-1] == "[DONE]"
    assert streamed.said()["text"] == whole.said()["text"] != ""
    assert streamed.said()["finish_reason"] == whole.said()["finish_reason"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert streamed.usage[name] == whole.usage[name]
    assert 0 < whole.usage["completion_tokens"] <= TOKENS


@pytest.mark.asyncio(loop_scope="module")
async def test_the_second_of_two_equal_prompts_is_found_in_the_cache(worker: Worker) -> None:
    asked = {"prompt": worker.fresh_prompt(), "max_tokens": 2}
    cached = [
        (await worker.ask(COMPLETIONS, asked, x_dp_rank="0")).usage["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached == [0, PROMPT_BLOCKS * worker.block_size]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_another_model_is_refused(worker: Worker, path: str) -> None:
    asked = chat(worker) if path == CHAT else {"prompt": worker.fresh_prompt()}
    answered = await worker.ask(path, asked | {"model": "unknown", "max_tokens": 2})
    assert (answered.status, "error" in answered.body) == (404, True)


# --------------------------------------------------------------------------------------------------------- caches
@pytest.mark.asyncio(loop_scope="module")
async def test_the_rank_that_computed_a_prompt_is_the_one_that_is_known_to_hold_it(worker: Worker) -> None:
    for asked in worker.ranks:
        prompt = worker.fresh_prompt()
        answered = await worker.ask(COMPLETIONS, {"prompt": prompt, "max_tokens": 2}, x_dp_rank=str(asked.dp_rank))
        assert answered.status == 200, answered.data
        await worker.until_indexed(prompt)
        held = {rank.dp_rank: worker.overlap_blocks(rank, prompt) for rank in worker.ranks}
        assert held == {rank.dp_rank: PROMPT_BLOCKS * (rank == asked) for rank in worker.ranks}


@pytest.mark.asyncio(loop_scope="module")
async def test_the_index_holds_what_the_mirror_holds_after_any_traffic(worker: Worker) -> None:
    """More than the caches hold, so that blocks are evicted, too; a pulse's digests are the proof."""
    for length in (1, worker.block_size, 7 * worker.block_size + 3, *[worker.long] * 3):
        prompt = worker.fresh_prompt() * (1 + length // (PROMPT_BLOCKS * worker.block_size))
        asked = {"prompt": prompt[:length], "max_tokens": 20}
        assert (await worker.ask(COMPLETIONS, asked, x_dp_rank="0")).status == 200
    await comes(worker.is_free, "nothing runs")
    await comes(lambda: all(worker.is_proven(rank) for rank in worker.ranks), "equal digests")
    state = worker.ground.index.state(worker.ranks[0])
    assert state is not None
    assert 0 < state.block_counts["gpu"] <= worker.registration.total_kv_blocks


# ----------------------------------------------------------------------------------------------------------- load
@pytest.mark.asyncio(loop_scope="module")
async def test_load_rises_with_a_request_and_falls_when_its_client_goes(worker: Worker) -> None:
    async with worker.open({"prompt": worker.fresh_prompt(), "max_tokens": worker.long}) as stream:
        await comes(lambda: worker.holds(PROMPT_BLOCKS), "load that has risen")
        assert not stream.is_done
    await comes(worker.is_free, "load that has fallen")
    assert (await worker.ask(COMPLETIONS, {"prompt": worker.fresh_prompt(), "max_tokens": 2})).status == 200


# ----------------------------------------------------------------------------------------------------------- ends
@pytest.mark.asyncio(loop_scope="module")
async def test_asked_to_stop_it_ends_what_it_began_and_takes_its_leave(ground: Ground, kind: str) -> None:
    async with KINDS[kind].start(ground, "aggregated", f"stopped-{kind}") as worker:
        async with worker.open({"prompt": worker.fresh_prompt(), "max_tokens": 200}) as stream:
            worker.stop()
            await comes(lambda: isinstance(worker.told[-1], WorkerDraining | WorkerLeft), "that it drains")
            assert await stream.rest()
            assert stream.is_done
        assert await worker.ending == ""
        await comes(lambda: isinstance(worker.told[-1], WorkerLeft), "that it left")
    assert [type(event) for event in worker.told] == [WorkerRegistered, WorkerDraining, WorkerLeft]


@pytest.mark.asyncio(loop_scope="module")
async def test_when_its_engine_dies_streams_end_as_broken_and_the_fleet_hears_of_it(ground: Ground, kind: str) -> None:
    if not KINDS[kind].can_be_killed:
        pytest.skip("the test did not start the engine, and may not end it")
    async with KINDS[kind].start(ground, "aggregated", f"killed-{kind}") as worker:
        async with worker.open({"prompt": worker.fresh_prompt(), "max_tokens": worker.long}) as stream:
            await worker.kill()
            is_whole = await stream.rest()
        assert not stream.is_done
        assert not is_whole or b'"error"' in stream.data, stream.data[-200:]
        await comes(lambda: isinstance(worker.told[-1], WorkerLeft), "that it is gone")
        assert [type(event) for event in worker.told] == [WorkerRegistered, WorkerLeft], "it was never said to drain"


# -------------------------------------------------------------------------------------------------- a planted bug
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.planted
async def test_a_worker_whose_mirror_is_not_what_it_published_is_found(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = Consolidation.heartbeat

    def other(self: Consolidation, *arguments: Any) -> Heartbeat:
        beat = heartbeat(self, *arguments)
        tiers = tuple(msgspec.structs.replace(each, digest=each.digest ^ 1) for each in beat.tiers)
        return msgspec.structs.replace(beat, tiers=tiers)

    monkeypatch.setattr(Consolidation, "heartbeat", other)
    monkeypatch.setattr(workers, "WAIT_S", 3.0)
    async with KINDS["simulated"].start(ground, "aggregated", "planted") as worker:
        with pytest.raises(AssertionError, match="equal digests"):
            await test_the_index_holds_what_the_mirror_holds_after_any_traffic(worker)
