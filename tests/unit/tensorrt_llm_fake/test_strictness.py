"""What is refused, by which exception, and what is taken as it is."""

from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.trtllm import Fake
from tests.unit.tensorrt_llm_fake.told import engine


def test_an_unknown_keyword_of_an_engine_is_a_value_error_that_names_it(trtllm: Fake) -> None:
    with pytest.raises(ValueError, match="LLM got invalid argument: max_tokens"):
        trtllm.module.LLM("none", max_tokens=3)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("KvCacheConfig", "surprise", 1),
        ("KvCacheConfig", "enable_block_reuse", "perhaps"),
        ("KvCacheConfig", "free_gpu_memory_fraction", 1.5),
        ("KvCacheConfig", "dtype", "int9"),
        ("KvCacheConfig", "max_attention_window", []),
        ("KVEventsConfig", "hwm", 0),
        ("SchedulerConfig", "capacity_scheduler_policy", "NO_EVICT"),
        ("DynamicBatchConfig", "dynamic_batch_moving_average_window", "wide"),
        ("CacheTransceiverConfig", "backend", "CARRIER_PIGEON"),
        ("CacheTransceiverConfig", "kv_transfer_timeout_ms", 0),
        ("MoeConfig", "backend", "cutlass"),
        ("MoeConfig", "backend", "WIDEEP"),
    ],
)
def test_a_nested_configuration_refuses_what_it_does_not_know(trtllm: Fake, name: str, field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        getattr(trtllm.llmapi, name)(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("top_p", 1.1), ("top_k", -1), ("temperature", -0.1), ("best_of", 0.5), ("n", 2)]
)
def test_sampling_parameters_out_of_range_are_value_errors(trtllm: Fake, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"top_p|top_k|temperature|best_of"):
        trtllm.module.SamplingParams(**{field: value})


def test_what_is_no_prompt_and_what_are_no_sampling_parameters_are_type_errors(trtllm: Fake) -> None:
    llm = engine(trtllm)
    for prompt, params in ((3, None), ([1, "2"], None), ({"text": "x"}, None), ("x", {"max_tokens": 3})):
        with pytest.raises(TypeError):
            llm.generate_async(prompt, params)


def test_without_tokenizer_the_end_token_must_be_given(trtllm: Fake) -> None:
    llm = engine(trtllm, skip_tokenizer_init=True)
    assert llm.tokenizer is None
    with pytest.raises(ValueError, match="end_id"):
        llm.generate_async([1, 2], trtllm.module.SamplingParams())
    result = llm.generate_async([1, 2], trtllm.module.SamplingParams(end_id=2, max_tokens=1)).result(timeout=30)
    assert (len(result.outputs[0].token_ids), result.outputs[0].text) == (1, "")


def test_a_prompt_longer_than_a_batch_is_a_request_error_at_once_unless_it_may_be_cut(trtllm: Fake) -> None:
    whole, cut = (engine(trtllm, max_num_tokens=8, max_batch_size=8, enable_chunked_prefill=each) for each in (0, 1))
    with pytest.raises(trtllm.llmapi.RequestError, match="max_num_tokens"):
        whole.generate_async([1] * 9)
    cut.generate_async([1] * 9).result(timeout=30)


def test_a_prompt_beyond_the_longest_sequence_fails_while_iterating(trtllm: Fake) -> None:
    llm = engine(trtllm, max_seq_len=8)
    result = llm.generate_async([1] * 8)
    with pytest.raises(trtllm.llmapi.RequestError, match="max_seq_len"):
        result.result(timeout=30)


def test_stop_strings_beside_an_end_token_are_not_tokenized_and_fail_while_iterating(trtllm: Fake) -> None:
    llm = engine(trtllm)
    result = llm.generate_async([1, 2], trtllm.module.SamplingParams(end_id=2, stop="x"))
    with pytest.raises(trtllm.llmapi.RequestError, match="not processed by tokenizer"):
        result.result(timeout=30)
