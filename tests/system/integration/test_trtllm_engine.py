"""TensorRT-LLM's engine over the fake package: what the contract of all engines does not say."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kv_runtime.clock import Clock
from tests.contract.engines import (
    LONGEST,
    PROMPT,
    failure,
    outputs,
    request,
    rows_until,
    tokens_of,
    trtllm_args,
    trtllm_engine,
)
from tests.support.engine_description import handoff_of_json
from tests.support.trtllm import Fake
from worker_agent.engines.trtllm.engine import TensorRTLLMEngine
from worker_agent.engines.trtllm.settings import TrtllmSettings
from worker_agent.port.handoff import handoff_json
from worker_agent.port.sampling import UNLIKELY, Guide, Sampling
from worker_agent.port.types import EngineError, EngineOutput, EngineStopped, RequestRefused

TRANSFER = {"cache_transceiver_config": {"backend": "NIXL", "max_tokens_in_buffer": 8192}}
WATCH = TrtllmSettings(watch_s=0.01, transfer_s=5.0)
QUICK = TrtllmSettings(transfer_s=0.1)


@asynccontextmanager
async def running(engine: TensorRTLLMEngine) -> AsyncIterator[TensorRTLLMEngine]:
    await engine.start()
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        try:
            yield engine
        finally:
            await engine.stop(0.0)


def worker(role: str, settings: TrtllmSettings = WATCH, **arguments: Any) -> TensorRTLLMEngine:
    return trtllm_engine(TRANSFER | arguments, settings, role=role)


async def handed_over(prefill: TensorRTLLMEngine, name: str = "a", **fields: Any) -> EngineOutput:
    (output,) = await outputs(prefill, request(name, **fields))
    return output


# ------------------------------------------------------------------------------------------------ start
async def test_the_engine_is_loaded_off_the_event_loop_and_the_time_is_known(trtllm: Fake) -> None:
    trtllm.control.delay_start()
    engine = trtllm_engine()
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.start())
        with pytest.raises(EngineError, match="has not been started"):
            engine.describe()
        await asyncio.sleep(0)
        trtllm.control.finish_start()
    assert engine.load_s is not None
    assert engine.load_s >= 0
    assert engine.describe().version == trtllm.module.__version__
    await engine.stop(0.0)


async def test_a_start_that_is_cancelled_leaves_no_engine_behind(trtllm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trtllm.submodule("llmapi.llm").BaseLLM, "__del__")  # a kept reference would prevent it
    trtllm.control.delay_start()
    starting = asyncio.ensure_future(trtllm_engine().start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    trtllm.control.finish_start()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert trtllm.control.executors == []


async def test_an_engine_that_cannot_start_says_why(trtllm: Fake) -> None:
    trtllm.control.start_failure = RuntimeError("CUDA out of memory")
    with pytest.raises(EngineError, match="cannot be loaded: RuntimeError: CUDA out of memory"):
        await trtllm_engine().start()


REFUSED_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"kv_cache_config": {"free_gpu_memory_fraction": 1.5}}, "kv_cache_config.free_gpu_memory_fraction: found 1.5"),
    ({"kv_cache_config": {"max_attention_window": [1, "x"]}}, "kv_cache_config.max_attention_window.1: "),
    (
        {"kv_cache_config": {"dtyp": "fp8"}},
        "kv_cache_config.dtyp: found 'fp8' (a text), allowed no such key",
    ),
    (
        {"scheduler_config": {"dynamic_batch_config": {"dynamic_batch_moving_average_window": "x"}}},
        "scheduler_config.dynamic_batch_config.dynamic_batch_moving_average_window: ",
    ),
    (
        {"backend": "_autodeploy", "tensor_parallel_size": 4},
        "tensor_parallel_size: found 4 (an integer), AutoDeploy only supports parallelization via",
    ),
    (
        {"backend": "_autodeploy", "max_beam_width": 2},
        "max_beam_width: found 2 (an integer), AutoDeploy does not support beam",
    ),
]


@pytest.mark.parametrize(("arguments", "told"), REFUSED_VALUES)
async def test_what_the_engine_s_own_model_refuses_is_told_with_its_place(
    trtllm: Fake, arguments: dict[str, Any], told: str
) -> None:
    trtllm.control.start_failure = AssertionError("the model was loaded")
    with pytest.raises(EngineError) as caught:
        await trtllm_engine(arguments, engine_version="1.3.0rc29").start()
    first, line = str(caught.value).split("\n")
    assert first == "the engine refuses its arguments:"
    assert line.startswith(f"  engine.yaml: {told}")


@pytest.mark.usefixtures("trtllm")
async def test_a_name_that_the_engine_does_not_know_is_told_with_its_place() -> None:
    with pytest.raises(EngineError, match=r"got invalid argument: newer; newer: file \(engine\.yaml\)$"):
        await trtllm_engine({"newer": 1}, engine_version="1.3.0rc29").start()


@pytest.mark.parametrize(("asked", "longest"), [(None, 100), (50, 50), (400, 100)])
async def test_the_longest_sequence_is_the_one_that_the_engine_infers(
    trtllm: Fake, tmp_path: Path, asked: int | None, longest: int
) -> None:
    trtllm.control.model = replace(trtllm.control.model, max_seq_len=100)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 50, "rope_scaling": {"factor": 2}}')
    arguments = {"model": str(tmp_path), "max_seq_len": asked, "skip_tokenizer_init": True}
    async with running(trtllm_engine(arguments)) as engine:
        assert engine.describe().max_seq_len == longest
        assert len(tokens_of(await outputs(engine, request(max_tokens=longest - len(PROMPT))))) == longest - len(PROMPT)
        with pytest.raises(RequestRefused, match=f"at most {longest} together"):
            await outputs(engine, request(max_tokens=longest))


@pytest.mark.parametrize(("asked", "dtype"), [("auto", "nvfp4"), ("fp8", "fp8")])
async def test_the_kv_cache_has_the_dtype_of_the_argument_or_of_the_checkpoint(
    trtllm: Fake, tmp_path: Path, asked: str, dtype: str
) -> None:
    del trtllm
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 50, "torch_dtype": "bfloat16"}')
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "NVFP4"}}')
    cache = {"tokens_per_block": 32, "dtype": asked}
    arguments = {"model": str(tmp_path), "skip_tokenizer_init": True, "kv_cache_config": cache}
    async with running(trtllm_engine(arguments)) as engine:
        assert engine.describe().kv_cache_dtype == dtype


async def test_a_prompt_above_one_iteration_s_tokens_needs_chunked_prefill(trtllm: Fake) -> None:
    del trtllm
    short: dict[str, Any] = {"max_num_tokens": len(PROMPT) - 1}
    async with running(worker("aggregated", **short)) as engine, running(worker("prefill", **short)) as prefill:
        for each in (engine, prefill):
            assert each.describe().max_prompt_tokens == len(PROMPT) - 1
            with pytest.raises(RequestRefused, match=r"prompt: .* allowed at most 9: max_num_tokens"):
                await outputs(each, request())
    async with running(worker("prefill")) as prefill, running(worker("decode", **short)) as decode:
        answer = await handed_over(prefill)
        assert len(tokens_of(await outputs(decode, request(handoff=answer.handoff)))) == 4
        with pytest.raises(RequestRefused, match="at most 9"):
            await outputs(decode, request("b", is_context_and_generation=True))
    for arguments, told in (
        ({"enable_chunked_prefill": True}, 0),
        ({"context_parallel_size": 3}, 27),
        ({"max_num_tokens": LONGEST - 1}, 0),
    ):
        async with running(trtllm_engine(short | arguments)) as engine:
            assert engine.describe().max_prompt_tokens == told


async def test_nested_sections_become_new_objects_of_the_library_s_classes(trtllm: Fake) -> None:
    batches = {"dynamic_batch_config": {"dynamic_batch_moving_average_window": 64}}
    caches = {"tokens_per_block": 4, "max_attention_window": [64, 200]}
    ours = trtllm_args({"kv_cache_config": caches, "scheduler_config": batches})
    async with running(TensorRTLLMEngine(ours, Clock(), model="m")):
        (llm,) = trtllm.control.llms
        args = llm.args
        assert type(args.kv_cache_config) is trtllm.llmapi.KvCacheConfig
        assert args.scheduler_config.dynamic_batch_config.dynamic_batch_moving_average_window == 64
        args.kv_cache_config.max_attention_window.append(0)
        assert ours.value("kv_cache_config", "max_attention_window") == [64, 200]


async def test_the_backend_autodeploy_has_its_own_class(trtllm: Fake) -> None:
    ours = trtllm_args({"backend": "_autodeploy", "world_size": 2})
    async with running(TensorRTLLMEngine(ours, Clock(), model="m")) as engine:
        (llm,) = trtllm.control.llms
        assert isinstance(llm, trtllm.submodule("_torch.auto_deploy").LLM)
        assert len(tokens_of(await outputs(engine, request()))) == 4


async def test_each_attention_dp_rank_is_a_rank_of_ours_and_can_be_asked_for(trtllm: Fake) -> None:
    del trtllm
    async with running(trtllm_engine({"tensor_parallel_size": 2, "enable_attention_dp": True})) as engine:
        assert engine.describe().dp_ranks == (0, 1)
        await outputs(engine, request(dp_rank=1))
        stored = [event for event in engine.kv_events(5.0) if event["data"]["type"] == "stored"]
    assert {event["attention_dp_rank"] for event in stored} == {1}


# --------------------------------------------------------------------------------------------- requests


async def test_adapters_and_guides_reach_the_engine(trtllm: Fake, tmp_path: Any) -> None:
    settings = TrtllmSettings(loras={"law": str(tmp_path)})
    arguments = {"enable_lora": True, "guided_decoding_backend": "xgrammar"}
    async with running(trtllm_engine(arguments, settings)) as engine:
        await outputs(engine, request("a"))
        guided = Sampling(guide=Guide(kind="json", value={"type": "object"}))
        told = await outputs(engine, request("b", lora_name="law", queue_priority=1.0, sampling=guided))
        assert told[-1].cached_tokens == 0
    assert trtllm.control.executors == []


@pytest.mark.parametrize(("backend", "has_tags"), [("xgrammar", True), ("llguidance", False), (None, False)])
async def test_an_engine_that_xgrammar_guides_takes_structural_tags(
    trtllm: Fake, backend: str | None, *, has_tags: bool
) -> None:
    del trtllm
    async with running(trtllm_engine({"guided_decoding_backend": backend})) as engine:
        assert engine.describe().takes_structural_tags == has_tags
        guided = Sampling(guide=Guide(kind="structural_tag", value='{"type": "structural_tag", "format": {}}'))
        if has_tags:
            assert tokens_of(await outputs(engine, request(sampling=guided)))
        else:
            with pytest.raises(RequestRefused, match="guided_decoding"):
                await outputs(engine, request(sampling=guided))


async def test_a_request_that_the_engine_refuses_fails_alone(trtllm: Fake) -> None:
    async with running(trtllm_engine()) as engine:
        trtllm.control.refuse_request("not this one")
        with pytest.raises(RequestRefused, match="not this one"):
            await outputs(engine, request())
        trtllm.control.fail_request("nor this one")
        with pytest.raises(RequestRefused, match="nor this one"):
            await outputs(engine, request())
        impossible = Sampling(choices=2)
        with pytest.raises(RequestRefused, match="Greedy decoding"):
            await outputs(engine, request(sampling=impossible))
        assert len(tokens_of(await outputs(engine, request()))) == 4
    assert engine.failed_requests_total == 3


# ---------------------------------------------------------------------------------------------- death
async def test_a_dead_engine_ends_its_streams_and_then_run(trtllm: Fake) -> None:
    trtllm.control.hold()
    engine = trtllm_engine(settings=WATCH)
    await engine.start()
    async with asyncio.TaskGroup() as group:
        driving = group.create_task(failure(engine.run()))
        stream = group.create_task(failure(outputs(engine, request())))
        await asyncio.sleep(0)
        trtllm.control.kill(RuntimeError("Xid 79"))
    assert "Xid 79" in str(stream.result())
    assert isinstance(driving.result(), EngineStopped)
    assert engine.fault == "RuntimeError: Xid 79"
    with pytest.raises(EngineStopped, match="Xid 79"):
        await outputs(engine, request("late"))


async def test_polls_of_an_engine_that_is_not_there_are_engine_errors(trtllm: Fake) -> None:
    engine = trtllm_engine()
    with pytest.raises(EngineError, match="does not run"):
        engine.kv_events(0)
    async with running(engine):
        trtllm.control.fail_polls("stats", OSError("cut off"))
        with pytest.raises(EngineError, match="get_stats: OSError: cut off"):
            engine.iteration_stats(0)
    with pytest.raises(EngineError, match="does not run"):
        engine.iteration_stats(0)


# ------------------------------------------------------------------------------- prefill, decode, encode


async def test_a_log_probability_of_minus_infinity_can_be_handed_over(trtllm: Fake) -> None:
    del trtllm
    named = "tests.unit.worker_agent.logits_processors:masks_all_but_seven"
    settings = TrtllmSettings(transfer_s=0.1, logits_processors={"mask": named})
    fields: dict[str, Any] = {"sampling": Sampling(logprobs=3), "logits_processors": ("mask",)}
    async with running(worker("prefill", settings)) as prefill, running(worker("decode", settings)) as decode:
        answer = await handed_over(prefill, **fields)
        assert answer.handoff is not None
        handoff = handoff_of_json(handoff_json(answer.handoff))
        told = await outputs(decode, request(handoff=handoff, **fields))
    assert (handoff.disagg_request_id or 0) >> 62 == 1  # an id that no engine counts itself
    assert handoff.first_gen_log_probs is not None
    (place,) = handoff.first_gen_log_probs
    assert isinstance(place, tuple)
    assert sorted(each.logprob for each in place) == [UNLIKELY, UNLIKELY, 0.0]
    assert tokens_of(told) == [7] * 4


async def test_a_transfer_is_not_aborted_before_its_first_token(trtllm: Fake) -> None:
    async with running(worker("prefill")) as prefill, running(worker("decode")) as decode:
        answer = await handed_over(prefill)
        trtllm.control.hold()
        waiting = asyncio.ensure_future(failure(outputs(decode, request(max_tokens=150, handoff=answer.handoff))))
        await asyncio.sleep(0)
        result = trtllm.control.results[-1]
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not result.aborted()
        trtllm.control.release()
        await rows_until(prefill, lambda row: row["numActiveRequests"] == 0)
        row = await rows_until(decode, lambda row: row["numActiveRequests"] == 0)
        assert result.aborted()
    assert row["kvCacheStats"]["usedNumBlocks"] == 0
    assert len(result.outputs[0].token_ids) < 150


async def test_a_request_that_ends_before_its_transferred_kv_came_is_a_failed_transfer(trtllm: Fake) -> None:
    async with running(worker("prefill")) as prefill, running(worker("decode")) as decode:
        answer = await handed_over(prefill)
        trtllm.control.fail_request("KV cache transfer timed out")
        assert isinstance(await failure(outputs(decode, request(handoff=answer.handoff))), RequestRefused)
        assert decode.fetches.by_outcome["failed"] == 1
        trtllm.control.fail_request("nothing to do with transfers")
        await failure(outputs(prefill, request("b")))
    assert [each.fetches.by_outcome["failed"] for each in (prefill, decode)] == [0, 1]


@pytest.mark.usefixtures("trtllm")
async def test_a_prefill_worker_s_stop_waits_for_its_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = worker("prefill"), worker("decode")
    await prefill.start()
    answer = await handed_over(prefill)
    loop, polled, take = asyncio.get_running_loop(), asyncio.Event(), prefill.iteration_stats

    def noted(timeout_s: float) -> list[dict[str, Any]]:
        loop.call_soon_threadsafe(polled.set)
        return take(timeout_s)

    monkeypatch.setattr(prefill, "iteration_stats", noted)
    with capture_logs() as logs:
        async with running(decode), asyncio.TaskGroup() as group:
            stopping, waiting = group.create_task(prefill.stop(0.0)), group.create_task(polled.wait())
            await asyncio.wait({stopping, waiting}, return_when=asyncio.FIRST_COMPLETED)
            polled.set()
            assert not stopping.done()
            told = await outputs(decode, request(handoff=answer.handoff))
    assert len(tokens_of(told)) == 4
    assert not [each for each in logs if each["event"] == "transfers_not_over"]


async def test_an_engine_that_does_not_end_holds_up_neither_its_streams_nor_the_stop(
    trtllm: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    trtllm.control.hold()
    engine, released = trtllm_engine(settings=TrtllmSettings(shutdown_s=0.01)), threading.Event()
    await engine.start()
    (llm,) = trtllm.control.llms
    shutdown = llm.shutdown
    monkeypatch.setattr(llm, "shutdown", released.wait)
    waiting = asyncio.ensure_future(failure(outputs(engine, request())))
    await asyncio.sleep(0)
    try:
        await engine.stop(0.0)
        async with asyncio.timeout(10):
            assert isinstance(await waiting, EngineStopped)
    finally:
        released.set()
        shutdown()


@pytest.mark.parametrize("counts", [True, False])
async def test_a_prefill_worker_s_stop_does_not_wait_for_ever(trtllm: Fake, counts: bool) -> None:
    prefill = worker("prefill", QUICK, enable_iter_perf_stats=counts)
    await prefill.start()
    await handed_over(prefill)
    await prefill.stop(0.0)
    assert trtllm.control.executors == []


async def test_a_model_without_an_encoder_of_its_own_is_refused_at_start(trtllm: Fake, tmp_path: Path) -> None:
    for config, said in (('{"model_type": "llama4"}', "role encode: found 'llama4', allowed"), ("{", "config.json")):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(EngineError, match=said):
            await trtllm_engine({"model": str(tmp_path)}, role="encode").start()
    assert trtllm.control.executors == []


# ------------------------------------------------------------------------------------ logits processors
async def test_a_processor_changes_the_tokens_and_a_broken_one_changes_nothing(trtllm: Fake) -> None:
    del trtllm
    named = "tests.unit.worker_agent.logits_processors"
    settings = TrtllmSettings(logits_processors={"seven": f"{named}:only_seven", "broken": f"{named}:broken"})
    async with running(trtllm_engine(settings=settings)) as engine:
        free = tokens_of(await outputs(engine, request("a")))
        forced = tokens_of(await outputs(engine, request("b", logits_processors=("seven",))))
        kept = tokens_of(await outputs(engine, request("c", logits_processors=("broken",))))
        assert engine.fault is None
    assert (forced, kept) == ([7] * 4, free)
    assert engine.logits_errors_total == {"seven": 0, "broken": 4}
