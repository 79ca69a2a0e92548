"""The table of the engine's arguments against the names that the engine's own manifest lists.

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/usage/llm_args_golden_manifest.json`, commit
0004396720054fd8e205cbf616f21f0b57c6b412: the arguments whose type is closed (free texts and objects are not in it).
"""

import pytest

from worker_agent.engine_args.field_kinds import Field
from worker_agent.engine_args.fields import ENGINE, field_at
from worker_agent.engine_args.rules import DEFAULTS, FLAGS

BOOLEANS = """
disable_mm_encoder disable_overlap_scheduler enable_attention_dp enable_autotuner enable_chunked_prefill
enable_early_first_token_response enable_encoder_decoder_mixed_cuda_graph enable_energy_metrics
enable_in_graph_sampling enable_iter_perf_stats enable_iter_req_stats enable_layerwise_nvtx_marker
enable_lm_head_tp_in_adp enable_lora enable_low_latency_host_dispatch enable_min_latency enable_mla_skip_correction
enable_resource_governor enable_speculative_beam_history_d2h encode_only force_dynamic_quantization
gather_generation_logits mm_encoder_only print_iter_log return_perf_metrics sampler_force_async_worker
skip_tokenizer_init trust_remote_code use_cute_dsl_bf16_bmm use_cute_dsl_bf16_gemm use_cute_dsl_blockscaling_bmm
use_cute_dsl_blockscaling_mm use_fine_grained_sync
attention_dp_config.enable_balance attention_dp_config.enable_kv_cache_aware_routing
attention_dp_config.kv_cache_routing_account_for_in_transfer attention_dp_config.kv_cache_routing_cold_start_warmup
attention_dp_config.kv_cache_routing_conversation_affinity cache_transceiver_config.enable_pipelined_transfer
cuda_graph_config.enable_padding kv_cache_config.copy_on_partial_reuse kv_cache_config.enable_block_reuse
kv_cache_config.enable_kv_pool_rebalance kv_cache_config.enable_partial_reuse kv_cache_config.enable_swa_scratch_reuse
kv_cache_config.kv_events_config.enable_kv_cache_events kv_cache_config.mamba_ssm_stochastic_rounding
kv_cache_config.use_kv_cache_manager_v2 kv_cache_config.use_uvm moe_config.disable_finalize_fusion
moe_config.use_low_precision_moe_combine scheduler_config.dynamic_batch_config.enable_batch_size_tuning
scheduler_config.dynamic_batch_config.enable_max_num_tokens_tuning scheduler_config.enable_prefix_aware_scheduling
scheduler_config.use_python_scheduler torch_compile_config.enable_fullgraph torch_compile_config.enable_inductor
torch_compile_config.enable_piecewise_cuda_graph torch_compile_config.enable_userbuffers
"""

INTEGERS = """
batch_wait_timeout_iters context_parallel_size encoder_max_batch_size? encoder_max_num_tokens?
garbage_collection_gen0_threshold gpus_per_node? iter_stats_max_iterations? max_batch_size? max_beam_width?
max_input_len? max_num_tokens? max_seq_len? max_stats_len moe_cluster_parallel_size? moe_expert_parallel_size?
moe_tensor_parallel_size? num_postprocess_workers num_serve_frontends perf_metrics_max_requests pipeline_parallel_size
request_stats_max_iterations? stream_interval tensor_parallel_size
attention_dp_config.batching_wait_iters attention_dp_config.kv_cache_routing_max_sessions
attention_dp_config.timeout_iters cache_transceiver_config.kv_cache_bounce_size_mb
cache_transceiver_config.kv_transfer_poll_interval_ms? cache_transceiver_config.kv_transfer_sender_future_timeout_ms?
cache_transceiver_config.kv_transfer_timeout_ms? cache_transceiver_config.max_tokens_in_buffer? cp_config.fifo_version?
cp_config.tokens_per_block? cuda_graph_config.max_batch_size cuda_graph_config.max_num_token
cuda_graph_config.max_seq_len kv_cache_config.attention_dp_events_gather_period_ms kv_cache_config.avg_seq_len?
kv_cache_config.block_reuse_config.max_num_turns kv_cache_config.disk_cache_size? kv_cache_config.disk_prefetch_num_reqs
kv_cache_config.event_buffer_max_size kv_cache_config.fp8_context_mla_kv_len_cap? kv_cache_config.host_cache_size?
kv_cache_config.iteration_stats_interval kv_cache_config.kv_events_config.buffer_steps
kv_cache_config.kv_events_config.hwm kv_cache_config.kv_events_config.max_queue_size
kv_cache_config.kv_pool_rebalance_check_interval kv_cache_config.kv_pool_rebalance_min_sampled_kv_caches
kv_cache_config.kv_pool_rebalance_target_ratio_update_interval kv_cache_config.mamba_ssm_philox_rounds
kv_cache_config.max_gpu_total_bytes kv_cache_config.max_tokens? kv_cache_config.secondary_offload_min_priority?
kv_cache_config.sink_token_length? kv_cache_config.tokens_per_block moe_config.max_num_tokens?
scheduler_config.dynamic_batch_config.dynamic_batch_moving_average_window torch_compile_config.max_num_streams
"""

NUMBERS = """
batch_wait_max_tokens_ratio batch_wait_timeout_ms mla_skip_correction_threshold
attention_dp_config.kv_cache_routing_fair_share_multiplier attention_dp_config.kv_cache_routing_load_balance_weight
attention_dp_config.kv_cache_routing_match_rate_threshold kv_cache_config.cross_kv_cache_fraction?
kv_cache_config.free_gpu_memory_fraction? kv_cache_config.kv_pool_rebalance_cooldown_secs
kv_cache_config.kv_pool_rebalance_moving_average_decay kv_cache_config.kv_pool_rebalance_ratio_threshold
kv_cache_config.max_util_for_resume
"""

TEXTS = """
allreduce_strategy? attn_backend backend checkpoint_io_policy dtype generation_config guided_decoding_backend?
load_format orchestrator_type? prefill_cuda_graph_backend reasoning_parser? tokenizer_mode
attention_dp_config.kv_cache_routing_new_conv_placement cache_transceiver_config.backend?
cache_transceiver_config.transceiver_runtime? cp_config.cp_type cuda_graph_config.mode
kv_cache_config.block_reuse_config.policy kv_cache_config.dtype kv_cache_config.kv_cache_event_hash_algo
kv_cache_config.kv_events_config.publisher? kv_cache_config.mamba_ssm_cache_dtype kv_connector_config.connector?
moe_config.backend scheduler_config.capacity_scheduler_policy scheduler_config.context_chunking_policy?
scheduler_config.waiting_queue_policy
"""

LISTS = """
pp_partition? prefill_capture_num_tokens? cuda_graph_config.batch_sizes? cuda_graph_config.num_tokens?
cuda_graph_config.seq_lens? kv_cache_config.max_attention_window? kv_cache_config.pool_ratio?
nvfp4_gemm_config.allowed_backends torch_compile_config.capture_num_tokens?
"""

MAPPINGS = """
dwdp_config encoder_cuda_graph_config gms_config kv_cache_compression_config layer_wise_benchmarks_config lora_config
multimodal_config mx_config peft_cache_config prometheus_metrics_config ray_placement_config reorder_policy_config
sparse_attention_config speculative_config telemetry_config kv_cache_config.mamba_state_config
"""

NAMES = f"{BOOLEANS} {INTEGERS} {NUMBERS} {TEXTS} {LISTS} {MAPPINGS}".split()
"""A question mark says that null is allowed."""


def test_the_arguments_of_the_manifest_are_known_by_name() -> None:
    assert [name for name in NAMES if field_at(path_of(name)) is None] == []


@pytest.mark.parametrize("kind", ["boolean", "integer", "text"])
def test_a_type_that_is_checked_is_that_of_the_manifest(kind: str) -> None:
    of_kind = {"boolean": BOOLEANS, "integer": INTEGERS, "text": TEXTS}[kind].split()
    fields = {name: field for name in NAMES if (field := field_at(path_of(name))) is not None}
    assert {name for name, field in fields.items() if field.kind == kind} <= {*of_kind}
    if kind != "text":  # the engine says which text may be null
        checked = {name for name in of_kind if fields[name].kind == kind}
        assert [name for name in checked if fields[name].nullable != name.endswith("?")] == []


def path_of(name: str) -> tuple[str, ...]:
    return tuple(name.removesuffix("?").split("."))


def test_the_defaults_and_the_flags_are_arguments_that_the_engine_has() -> None:
    for path in FLAGS.values():
        assert field_at(path) is not None
    check_known(DEFAULTS.values, ENGINE)


def check_known(values: object, field: Field) -> None:
    assert field.fits(values)
    if field.kind == "section":
        assert isinstance(values, dict)
        for name, value in values.items():
            check_known(value, field.fields[name])


def test_a_path_that_is_not_known_has_no_field() -> None:
    assert field_at(("kv_cache_config", "unheard", "of")) is None
