"""What is refused, by which exception, and what is taken as it is."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.trtllm import Fake
from tests.unit.tensorrt_llm_fake.told import engine, is_healthy


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
        ("KvCacheConfig", "disk_cache_size", 1),
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


def test_nested_maps_are_read_and_refused_like_their_models(trtllm: Fake) -> None:
    llm = trtllm.module.LLM("none", scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"})
    assert llm.args.scheduler_config.capacity_scheduler_policy is trtllm.llmapi.CapacitySchedulerPolicy.MAX_UTILIZATION
    with pytest.raises(ValidationError, match=r"kv_cache_config\.surprise"):
        trtllm.module.LLM("none", kv_cache_config={"surprise": 1})


def test_a_nested_configuration_is_not_copied(trtllm: Fake) -> None:
    config = trtllm.llmapi.KvCacheConfig()
    assert trtllm.module.LLM("none", kv_cache_config=config).args.kv_cache_config is config


def test_more_gpus_than_there_are_is_a_runtime_error(trtllm: Fake) -> None:
    with pytest.raises(RuntimeError, match="Only 8 GPUs are available, but 16 are required"):
        trtllm.module.LLM("none", tensor_parallel_size=16, gpus_per_node=16)


def test_autodeploy_refuses_every_parallelism_but_world_size(trtllm: Fake) -> None:
    with pytest.raises(ValidationError, match="only supports parallelization via the `world_size`"):
        trtllm.module.LLM("none", backend="_autodeploy", tensor_parallel_size=2)
    llm = trtllm.submodule("_torch.auto_deploy").LLM("none", world_size=2)
    assert (llm.args.backend, llm.args.parallel_config.world_size) == ("_autodeploy", 2)


def test_fields_of_autodeploy_are_unknown_to_pytorch(trtllm: Fake) -> None:
    with pytest.raises(ValueError, match="invalid argument: world_size"):
        trtllm.module.LLM("none", world_size=2)


@pytest.mark.parametrize(
    ("field", "value"), [("top_p", 1.1), ("top_k", -1), ("temperature", -0.1), ("best_of", 0.5), ("n", 2)]
)
def test_sampling_parameters_out_of_range_are_value_errors(trtllm: Fake, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"top_p|top_k|temperature|best_of"):
        trtllm.module.SamplingParams(**{field: value})


def test_unknown_sampling_parameters_are_type_errors_and_unknown_attributes_attribute_errors(trtllm: Fake) -> None:
    with pytest.raises(TypeError, match="seeds"):
        trtllm.module.SamplingParams(seeds=1)
    with pytest.raises(AttributeError):
        trtllm.module.SamplingParams().seeds = 1


def test_two_guides_are_one_too_many(trtllm: Fake) -> None:
    guides = trtllm.llmapi.GuidedDecodingParams(regex="a", json_object=True)
    with pytest.raises(ValueError, match="Only one guide"):
        trtllm.module.SamplingParams(guided_decoding=guides)


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


def test_a_priority_outside_its_range_is_a_value_error(trtllm: Fake) -> None:
    with pytest.raises(ValueError, match="priority"):
        engine(trtllm).generate_async([1], priority=2.0)


def test_an_engine_can_neither_be_pickled_nor_copied(trtllm: Fake) -> None:
    with pytest.raises(RuntimeError, match="pickled"):
        copy.deepcopy(engine(trtllm))


def test_building_blocks_until_the_engine_is_up(trtllm: Fake) -> None:
    trtllm.control.delay_start()
    built: list[Any] = []
    thread = threading.Thread(target=lambda: built.append(engine(trtllm)))
    thread.start()
    assert not built
    trtllm.control.finish_start()
    thread.join(timeout=30)
    assert is_healthy(built[0])


def test_building_fails_as_asked_and_leaves_no_engine(trtllm: Fake) -> None:
    trtllm.control.start_failure = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        engine(trtllm)
    assert not trtllm.control.executors


def test_extra_options_replace_all_but_the_cache_configuration_which_is_merged(trtllm: Fake, tmp_path: Path) -> None:
    path = tmp_path / "extra.yaml"
    path.write_text("kv_cache_config: {max_tokens: 64}\nscheduler_config: {use_python_scheduler: true}\n")
    base = {
        "kv_cache_config": trtllm.llmapi.KvCacheConfig(free_gpu_memory_fraction=0.5),
        "scheduler_config": trtllm.llmapi.SchedulerConfig(),
    }
    merged = trtllm.submodule("llmapi.llm_utils").update_llm_args_with_extra_options(base, str(path))
    cache = merged["kv_cache_config"]
    assert (cache.max_tokens, cache.free_gpu_memory_fraction) == (64, 0.5)
    assert merged["scheduler_config"] == {"use_python_scheduler": True}


@pytest.mark.parametrize("text", ["- a\n", "kv_cache_config: {surprise: 1}\n"])
def test_extra_options_that_are_no_map_or_are_refused_are_value_errors(trtllm: Fake, tmp_path: Path, text: str) -> None:
    path = tmp_path / "extra.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"mapping|surprise"):
        trtllm.submodule("llmapi.llm_args").update_llm_args_with_extra_options({}, str(path))


def test_a_connector_preset_stands_for_module_and_classes_which_older_versions_want_themselves(trtllm: Fake) -> None:
    connector = trtllm.submodule("llmapi.llm_args").KvCacheConnectorConfig
    preset = connector(connector="kvbm")
    assert preset.connector_module == "kvbm.trtllm_integration.connector"
    explicit = preset.model_dump(exclude={"connector"})
    with pytest.raises(ValidationError, match="Unknown connector preset"):
        connector(connector="unknown")
    with pytest.raises(ValidationError, match="connector_worker_class is required"):
        connector(connector_module="m", connector_scheduler_class="S")
    trtllm.control.version = "1.3.0rc5.post1"
    with pytest.raises(ValidationError, match="not permitted"):
        connector(connector="kvbm")
    assert connector(**explicit).connector_worker_class == "DynamoKVBMConnectorWorker"


def test_a_model_s_defaults_count_where_nothing_is_set(trtllm: Fake) -> None:
    trtllm.control.model_defaults = {"kv_cache_config": {"tokens_per_block": 64, "enable_block_reuse": False}}
    unset = trtllm.module.LLM("none")
    assert unset.get_kv_cache_capacity()["tokensPerBlock"] == 64
    assert unset.args.kv_cache_config.tokens_per_block == 32  # the worker's process has it, not this one
    config = trtllm.llmapi.KvCacheConfig(tokens_per_block=32)
    assert trtllm.module.LLM("none", kv_cache_config=config).get_kv_cache_capacity()["tokensPerBlock"] == 32
    trtllm.control.model_defaults = {"cache_transceiver_config": None}
    with pytest.raises(ValueError, match="must not contain 'cache_transceiver_config'"):
        trtllm.module.LLM("none")
