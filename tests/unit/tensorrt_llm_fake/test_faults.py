"""The faults that a test can ask for, each seen from outside."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest
import zmq

from tests.support.trtllm import Fake
from tests.unit.tensorrt_llm_fake.told import Json, engine, events, executor_of, fatal_error, finished, is_healthy

PROMPT = list(range(1, 10))


def ids(told: list[Json]) -> list[int]:
    return [each["event_id"] for each in told]


def test_a_dead_engine_fails_what_runs_and_refuses_what_comes(trtllm: Fake) -> None:
    llm = engine(trtllm)
    trtllm.control.hold()
    pending = [llm.generate_async(PROMPT) for _ in range(2)]
    cause = RuntimeError("a worker died")
    trtllm.control.kill(cause)
    dead = trtllm.submodule("executor.utils").EngineDeadError
    for result in [*pending, pending[0]]:
        with pytest.raises(dead, match="a worker died") as caught:
            result.result(timeout=30)
        assert caught.value.root_cause is cause
    with pytest.raises(dead):
        llm.generate_async(PROMPT)
    assert (is_healthy(llm), executor_of(llm).is_shutdown(), fatal_error(llm)) == (False, True, cause)


@pytest.mark.asyncio
async def test_a_dead_engine_wakes_waiting_tasks(trtllm: Fake) -> None:
    llm = engine(trtllm)
    trtllm.control.hold()
    waiter = asyncio.ensure_future(llm.generate_async(PROMPT).aresult())
    await asyncio.sleep(0)
    await asyncio.to_thread(trtllm.control.kill)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await waiter


def test_a_dead_engine_wakes_polling_threads(trtllm: Fake) -> None:
    llm = engine(trtllm)
    events(llm)
    told: list[list[Json]] = []
    thread = threading.Thread(target=lambda: told.append(llm.get_kv_cache_events(timeout=600)))
    thread.start()
    trtllm.control.kill()
    thread.join(timeout=30)
    assert told == [[]]


def test_an_engine_can_die_in_an_iteration(trtllm: Fake) -> None:
    trtllm.control.die_at_iteration = 3
    llm = engine(trtllm)
    result = llm.generate_async(PROMPT, trtllm.module.SamplingParams(max_tokens=50), streaming=True)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        result.result(timeout=30)
    assert result.outputs[0].length == 3


def test_an_error_in_a_logits_processor_is_the_engines(trtllm: Fake) -> None:
    def broken(*told: Any) -> None:
        raise ZeroDivisionError(f"processor of {len(told)}")

    llm = engine(trtllm)
    with pytest.raises(RuntimeError, match="processor"):
        llm.generate_async(PROMPT, trtllm.module.SamplingParams(logits_processor=broken)).result(timeout=30)
    assert not is_healthy(llm)


def test_a_request_can_be_refused_or_fail_alone(trtllm: Fake) -> None:
    llm = engine(trtllm)
    trtllm.control.refuse_request("no")
    with pytest.raises(trtllm.llmapi.RequestError, match="no"):
        llm.generate_async(PROMPT)
    trtllm.control.fail_request("not today")
    failed = llm.generate_async(PROMPT)
    with pytest.raises(trtllm.llmapi.RequestError, match="not today"):
        failed.result(timeout=30)
    assert failed.error == "not today"
    assert finished(llm, trtllm, PROMPT).finished
    assert is_healthy(llm)


@pytest.mark.parametrize(("poll", "method"), [("kv_events", "get_kv_cache_events"), ("stats", "get_stats")])
@pytest.mark.parametrize("form", ["", "_async"])
def test_a_polling_call_raises_once_and_loses_nothing(trtllm: Fake, poll: Any, method: str, form: str) -> None:
    llm = engine(trtllm)
    finished(llm, trtllm, PROMPT)
    trtllm.control.fail_polls(poll, OSError("cut off"))
    with pytest.raises(OSError, match="cut off"):
        getattr(llm, method + form)(0)
    assert getattr(llm, method)(0)


def test_a_polling_call_can_swallow_its_error_as_the_rpc_path_does(trtllm: Fake) -> None:
    llm = engine(trtllm)
    trtllm.control.polls_raise = False
    trtllm.control.fail_polls("kv_events", OSError("cut off"))
    assert events(llm) == []
    assert ids(events(llm)) == [0]


@pytest.mark.asyncio
async def test_polling_with_async_yields_maps_until_none_comes(trtllm: Fake) -> None:
    llm = engine(trtllm)
    await llm.generate_async(PROMPT)
    for poll in (llm.get_kv_cache_events_async, llm.get_stats_async):
        assert [each async for each in poll(timeout=0.01)]
        assert [each async for each in poll(timeout=0.01)] == []


def test_polling_without_a_loop_cannot_be_iterated_in_one(trtllm: Fake) -> None:
    llm = engine(trtllm)
    result = llm.get_kv_cache_events_async(timeout=0)

    async def first() -> Json:
        return dict(await anext(result))

    with pytest.raises(AssertionError, match="event loop was not present"):
        asyncio.run(first())


def test_polling_waits_for_the_first_event_and_then_takes_all(trtllm: Fake) -> None:
    llm = engine(trtllm)
    events(llm)
    told: list[Json] = []
    thread = threading.Thread(target=lambda: told.extend(llm.get_kv_cache_events(timeout=30)))
    thread.start()
    finished(llm, trtllm, PROMPT)
    thread.join(timeout=30)
    assert ids(told + events(llm)) == [1, 2]


def test_an_overflowing_buffer_loses_the_oldest_and_leaves_a_gap(trtllm: Fake) -> None:
    llm = engine(trtllm, cache={"event_buffer_max_size": 3})
    for first in range(4):
        finished(llm, trtllm, [first] * 9)
    assert ids(events(llm)) == [6, 7, 8]


def test_without_a_buffer_there_are_no_events(trtllm: Fake) -> None:
    llm = engine(trtllm, cache={"event_buffer_max_size": 0})
    finished(llm, trtllm, PROMPT)
    assert events(llm) == []


def test_events_can_be_lost_or_come_in_the_wrong_order(trtllm: Fake) -> None:
    llm = engine(trtllm)
    events(llm)
    trtllm.control.lose_events(1)
    finished(llm, trtllm, PROMPT)
    assert ids(events(llm)) == [2]
    trtllm.control.inject_event({"type": "surprise"}, window_size=None)
    trtllm.control.swap_events()
    finished(llm, trtllm, [70] * 9, tokens=1)
    assert ids(events(llm)) == [3, 5, 4]


def test_a_block_can_name_a_token_too_many(trtllm: Fake) -> None:
    llm = engine(trtllm)
    trtllm.control.oversize_block()
    finished(llm, trtllm, PROMPT)
    assert [len(block["tokens"]) for block in events(llm)[1]["data"]["blocks"]] == [5, 4]


def test_media_can_get_uuids_that_were_not_given(trtllm: Fake) -> None:
    trtllm.control.uuid_keys = True
    llm = engine(trtllm)
    finished(llm, trtllm, {"prompt": "<image>?", "multi_modal_data": {"image": ["a"]}})
    keys = {key["hash"] for block in events(llm)[1]["data"]["blocks"] for key in block["mm_keys"]}
    assert [len(key) for key in keys] == [36]


def test_statistics_can_be_null_for_a_while(trtllm: Fake) -> None:
    llm = engine(trtllm)
    trtllm.control.null_statistics(2)
    finished(llm, trtllm, PROMPT, tokens=3)
    assert [row["kvCacheStats"] is None for row in llm.get_stats(timeout=5)] == [True, True, False]


def test_untaken_statistics_are_dropped_and_counted(trtllm: Fake) -> None:
    llm = engine(trtllm, max_stats_len=2)
    finished(llm, trtllm, PROMPT, tokens=5)
    rows = llm.get_stats(timeout=5)
    assert [(row["iter"], row["statsDroppedFrames"]) for row in rows] == [(4, 1), (5, 2)]


def test_statistics_are_off_unless_asked_for(trtllm: Fake) -> None:
    llm = trtllm.module.LLM("none")
    finished(llm, trtllm, PROMPT)
    assert llm.get_stats(timeout=0) == []


def test_after_shutdown_nothing_can_be_asked_and_it_may_be_repeated(trtllm: Fake) -> None:
    llm = engine(trtllm)
    trtllm.control.hold()
    pending = llm.generate_async(PROMPT)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="LLM is shutting down"):
        llm.generate_async(PROMPT)
    with pytest.raises(AttributeError):
        llm.get_stats(timeout=0)
    with pytest.raises(trtllm.llmapi.RequestError):
        pending.result(timeout=30)
    assert not is_healthy(llm)


def test_events_stream_over_zmq_where_asked_for_one_port_for_each_rank(trtllm: Fake) -> None:
    stream = trtllm.llmapi.KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", topic="kv")
    cache = {"use_kv_cache_manager_v2": True, "kv_events_config": stream}
    llm = engine(trtllm, cache=cache, tensor_parallel_size=2, enable_attention_dp=True)
    ports = executor_of(llm).streams.endpoints
    context = zmq.Context()
    try:
        socket = context.socket(zmq.SUB)
        for port in ports:
            socket.connect(port)
        socket.subscribe("kv")
        socket.setsockopt(zmq.RCVTIMEO, 100)
        scheduling = trtllm.submodule("scheduling_params").SchedulingParams(attention_dp_rank=1)
        frames = _first(socket, lambda at: finished(llm, trtllm, [at] * 9, scheduling_params=scheduling))
    finally:
        context.destroy(linger=0)
    _, told, rank = msgspec.msgpack.decode(frames[2])
    assert (len(set(ports)), frames[0], len(frames[1]), rank, told[0]["type"]) == (2, b"kv", 8, 1, "BlockStored")
    assert (told[0]["block_size"], len(told[0]["token_ids"])) == (4, 4 * len(told[0]["block_hashes"]))
    assert events(llm) == []


def test_streaming_needs_manager_v2(trtllm: Fake) -> None:
    stream = trtllm.llmapi.KVEventsConfig(enable_kv_cache_events=True)
    assert stream.publisher == "zmq"
    with pytest.raises(ValueError, match="use_kv_cache_manager_v2"):
        engine(trtllm, cache={"kv_events_config": stream})


def _first(socket: Any, cause: Any) -> list[bytes]:
    for at in range(200):  # a subscription takes effect some time after it is made
        cause(at)
        try:
            return list(socket.recv_multipart())
        except zmq.Again:
            continue
    raise AssertionError("nothing came")


@pytest.mark.timeout(20)
def test_an_engine_may_be_collected_by_a_thread_that_has_the_lock_of_the_fake(trtllm: Fake) -> None:
    llm = trtllm.module.LLM("none")
    with trtllm.control.changed:
        llm.__del__()
