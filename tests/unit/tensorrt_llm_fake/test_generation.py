"""A request's life: responses, texts, stops, logits, cancellation."""

import asyncio
from typing import Any

import pytest

from tests.support.trtllm import Fake
from tests.unit.tensorrt_llm_fake.told import engine, finished, is_healthy

PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.asyncio
async def test_a_streamed_result_is_one_object_whose_tokens_grow(trtllm: Fake) -> None:
    llm = engine(trtllm)
    result = llm.generate_async("hello", trtllm.module.SamplingParams(max_tokens=4), streaming=True)
    seen = [
        (each is result, each.outputs[0].length, each.outputs[0].token_ids_diff, each.finished) async for each in result
    ]
    tokens = result.outputs[0].token_ids
    assert seen == [(True, at + 1, [tokens[at]], at == 3) for at in range(4)]
    assert (result.outputs[0].finish_reason, result.outputs[0].text) == ("length", llm.tokenizer.decode(tokens))
    assert result.prompt_token_ids == llm.tokenizer.encode("hello")


@pytest.mark.asyncio
async def test_without_streaming_there_is_one_response(trtllm: Fake) -> None:
    llm = engine(trtllm)
    result = llm.generate_async(PROMPT, trtllm.module.SamplingParams(max_tokens=4))
    assert [each.outputs[0].length async for each in result] == [4]
    assert await result is result


@pytest.mark.asyncio
async def test_a_stream_interval_gathers_tokens(trtllm: Fake) -> None:
    llm = engine(trtllm, stream_interval=3)
    result = llm.generate_async(PROMPT, trtllm.module.SamplingParams(max_tokens=8), streaming=True)
    assert [each.outputs[0].length async for each in result] == [3, 6, 8]


def test_a_result_made_outside_a_loop_cannot_be_awaited(trtllm: Fake) -> None:
    llm = engine(trtllm)
    result = llm.generate_async(PROMPT)
    with pytest.raises(AssertionError, match="event loop was not present"):
        asyncio.run(result.aresult())
    assert result.result(timeout=30).finished


def test_tokens_depend_on_the_prompt_alone(trtllm: Fake) -> None:
    one, other = engine(trtllm), engine(trtllm, cache={"enable_block_reuse": False})
    first, again, elsewhere = (finished(llm, trtllm, PROMPT, 6) for llm in (one, one, other))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == elsewhere.outputs[0].token_ids
    assert (first.cached_tokens, again.cached_tokens, elsewhere.cached_tokens) == (0, 4, 0)
    assert finished(one, trtllm, [*PROMPT, 1], 6).outputs[0].token_ids != first.outputs[0].token_ids


def test_the_end_token_stops_and_can_be_ignored(trtllm: Fake) -> None:
    trtllm.control.model = type(trtllm.control.model)(eos_after_tokens=2)
    llm, params = engine(trtllm), trtllm.module.SamplingParams
    stopped = llm.generate_async(PROMPT, params(max_tokens=9)).result(timeout=30).outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason, stopped.token_ids[-1], stopped.length) == ("stop", None, 2, 3)
    for asked in ({"ignore_eos": True}, {"min_tokens": 5}):
        output = llm.generate_async(PROMPT, params(max_tokens=5, **asked)).result(timeout=30).outputs[0]
        assert (output.finish_reason, output.length) == ("length", 5)


@pytest.mark.parametrize("include", [False, True])
def test_stop_tokens_and_stop_strings_are_named_and_cut_unless_asked_for(trtllm: Fake, include: bool) -> None:
    llm, params = engine(trtllm), trtllm.module.SamplingParams
    text = llm.generate_async(PROMPT, params(max_tokens=6)).result(timeout=30).outputs[0].text
    for asked, reason in (({"stop": text[2:4]}, text[2:4]), ({"stop_token_ids": [3 + ord(text[3])]}, 3 + ord(text[3]))):
        stopped = params(max_tokens=6, include_stop_str_in_output=include, **asked)
        output = llm.generate_async(PROMPT, stopped).result(timeout=30).outputs[0]
        kept = 4 if include else 4 - (len(reason) if isinstance(reason, str) else 1)
        assert (output.finish_reason, output.stop_reason, output.text) == ("stop", reason, text[:kept])


def test_of_two_sequences_that_end_the_last_one_alone_says_why(trtllm: Fake) -> None:
    llm = engine(trtllm)
    params = trtllm.module.SamplingParams(max_tokens=3, n=2, temperature=1.0)
    outputs = llm.generate_async(PROMPT, params).result(timeout=30).outputs
    assert [(each.index, each.length, each.finish_reason) for each in outputs] == [(0, 3, None), (1, 3, "length")]
    assert outputs[0].token_ids != outputs[1].token_ids


def test_log_probabilities_come_with_ranks_for_the_best_and_the_chosen(trtllm: Fake) -> None:
    llm = engine(trtllm)
    output = (
        llm.generate_async(PROMPT, trtllm.module.SamplingParams(max_tokens=2, logprobs=3)).result(timeout=30).outputs[0]
    )
    assert [len(each) for each in output.logprobs] == [3, 3]
    assert [each[token].rank for token, each in zip(output.token_ids, output.logprobs, strict=True)] == [1, 1]
    assert output.cumulative_logprob == pytest.approx(2 * output.logprobs[0][output.token_ids[0]].logprob)


def test_a_logits_processor_sees_all_tokens_and_decides(trtllm: Fake) -> None:
    calls: list[tuple[int, tuple[int, ...], list[list[int]], Any, Any]] = []

    class Always(trtllm.submodule("sampling_params").LogitsProcessor):  # type: ignore[misc]
        def __call__(self, req_id: int, logits: Any, token_ids: Any, stream_ptr: Any, client_id: Any) -> None:
            calls.append((req_id, logits.shape, token_ids, stream_ptr, client_id))
            logits[:] = float("-inf")
            logits[..., 77] = 0

    llm = engine(trtllm)
    result = llm.generate_async(PROMPT, trtllm.module.SamplingParams(max_tokens=2, logits_processor=[Always()]))
    assert result.result(timeout=30).outputs[0].token_ids == [77, 77]
    shape = (1, 1, trtllm.control.model.vocab_size)
    assert calls == [(result.request_id, shape, [PROMPT + seen], None, None) for seen in ([], [77])]


@pytest.mark.asyncio
async def test_an_aborted_request_says_so_and_leaves_no_block_behind(trtllm: Fake) -> None:
    llm = engine(trtllm)
    trtllm.control.hold()
    result = llm.generate_async(PROMPT, trtllm.module.SamplingParams(max_tokens=99), streaming=True)
    trtllm.control.allow(2)
    assert [(await anext(result)).outputs[0].length for _ in range(2)] == [1, 2]
    result.abort()
    trtllm.control.release()
    assert (await result).outputs[0].finish_reason == "cancelled"
    assert (result.aborted(), result.outputs[0].length) == (True, 2)
    assert llm.get_stats(timeout=5)[-1]["kvCacheStats"]["usedNumBlocks"] == 0


def test_aborting_what_has_ended_changes_nothing(trtllm: Fake) -> None:
    result = finished(llm := engine(trtllm), trtllm, PROMPT)
    result.abort()
    assert result.outputs[0].finish_reason == "length"
    assert is_healthy(llm)


def test_requests_wait_for_room_and_are_computed_later(trtllm: Fake) -> None:
    trtllm.control.model = type(trtllm.control.model)(gpu_blocks=5)
    llm = engine(trtllm)
    params = trtllm.module.SamplingParams
    results = [llm.generate_async([at] * 9, params(max_tokens=8)) for at in range(6)]
    assert [each.result(timeout=30).outputs[0].length for each in results] == [8] * 6
    assert max(row["numActiveRequests"] for row in llm.get_stats(timeout=5)) <= 1


def test_a_request_is_measured_where_the_engine_or_it_asks(trtllm: Fake) -> None:
    llm = engine(trtllm)
    finished(llm, trtllm, PROMPT)
    params = trtllm.module.SamplingParams(max_tokens=4, return_perf_metrics=True)
    told = llm.generate_async(PROMPT, params).result(timeout=30).outputs[0].request_perf_metrics
    cache, timing = told.kv_cache_metrics, told.timing_metrics
    assert (cache.num_total_allocated_blocks, cache.num_new_allocated_blocks) == (3, 2)
    assert (cache.num_reused_blocks, cache.num_missed_blocks, cache.kv_cache_hit_rate) == (1, 1, 0.5)
    assert timing.arrival_time < timing.first_scheduled_time < timing.first_token_time < timing.last_token_time
    assert told.last_iter - told.first_iter == 3
    assert finished(llm, trtllm, PROMPT).outputs[0].request_perf_metrics is None


def test_the_logger_takes_the_engine_librarys_level_names(trtllm: Fake) -> None:
    logger = trtllm.module.logger
    logger.set_level("verbose")
    assert logger.level == "verbose"
    with pytest.raises(KeyError):
        logger.set_level("chatty")
