"""Conversion between roles and sizes: what changes, what stays, and that there and back is where it began."""

from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.unit.worker_agent.engine_arguments import effective
from worker_agent.engine_args.convert import NotConvertible, Target, converted, resized
from worker_agent.engine_args.text import read_file

Args = dict[str, Any]
DECODE: Args = {
    "tensor_parallel_size": 4,
    "moe_expert_parallel_size": 4,
    "disable_overlap_scheduler": False,
    "max_num_tokens": 2048,
    "max_seq_len": 9000,
    "kv_cache_config": {"dtype": "fp8", "enable_block_reuse": False},
    "cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 9216},
}


def test_a_decode_worker_becomes_an_aggregated_one() -> None:
    result = converted(DECODE, "aggregated")
    assert "cache_transceiver_config" not in result
    assert result["kv_cache_config"] == {"dtype": "fp8", "enable_block_reuse": True}
    assert result["enable_chunked_prefill"] is True
    assert DECODE["kv_cache_config"]["enable_block_reuse"] is False


def test_back_again_it_has_a_transceiver_with_room_for_the_longest_prompt() -> None:
    result = converted(converted(DECODE, "aggregated"), "prefill", "NIXL")
    assert result["cache_transceiver_config"] == {"backend": "NIXL", "max_tokens_in_buffer": 9000}
    assert effective(result, role="prefill", publishes_kv_events=True).warnings == ()


def test_a_buffer_that_is_null_gets_room_for_the_longest_prompt() -> None:
    unset = {"max_seq_len": 9000, "cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": None}}
    assert converted(unset, "decode")["cache_transceiver_config"]["max_tokens_in_buffer"] == 9000


def test_a_switched_off_overlap_scheduler_is_the_prefill_worker_s_alone() -> None:
    assert "disable_overlap_scheduler" not in converted({"disable_overlap_scheduler": True}, "aggregated")
    assert converted(DECODE, "aggregated")["disable_overlap_scheduler"] is False


def test_what_does_not_divide_the_new_size_is_refused() -> None:
    with pytest.raises(NotConvertible, match=r"moe_expert_parallel_size: found 4, allowed a divisor of .*, 6"):
        resized({"tensor_parallel_size": 8, "moe_expert_parallel_size": 4}, 6)
    slots = {
        "tensor_parallel_size": 16,
        "moe_expert_parallel_size": 16,
        "moe_config": {"load_balancer": {"num_slots": 288}},
    }
    assert resized(slots, 8)["moe_expert_parallel_size"] == 8
    with pytest.raises(NotConvertible, match="found 288, allowed a multiple of moe_expert_parallel_size, 64"):
        resized(slots, 64)


def test_sizes_of_the_experts_whose_product_is_not_the_new_size_are_refused() -> None:
    both = {"tensor_parallel_size": 4, "moe_expert_parallel_size": 2, "moe_tensor_parallel_size": 2}
    with pytest.raises(NotConvertible, match="moe_expert_parallel_size x moe_tensor_parallel_size: found 2 x 2,"):
        resized(both, 8)
    assert resized(both, 4) == both
    all_experts = {"tensor_parallel_size": 4, "moe_expert_parallel_size": 4, "moe_tensor_parallel_size": 1}
    assert resized(all_experts, 8)["moe_expert_parallel_size"] == 8


@pytest.mark.parametrize("target", ["aggregated", "decode"])
def test_a_section_that_is_no_mapping_is_refused(target: Target) -> None:
    with pytest.raises(NotConvertible, match="kv_cache_config: found int, allowed a mapping"):
        converted({"kv_cache_config": 3}, target)


@pytest.mark.parametrize("name", ["gpt-oss-120b/decode", "qwen3/decode", "deepseek-r1/simple-prefill"])
def test_the_files_of_the_repository_can_be_converted(name: str) -> None:
    file = dict(read_file(ROOT / "configs" / "engines" / f"{name}.yaml", "file").values)
    assert effective(converted(file, "aggregated"), publishes_kv_events=True).warnings == ()
