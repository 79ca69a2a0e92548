"""The names of the engine's arguments, and the types of those that the agent reads.

    read by the agent (rules, checks, registration)    type and range: the agent computes with it
    a text                                             that it is one: `--trtllm.revision 12` means the text 12
    a section                                          its names
    any other                                          its name alone

What any other value may be is the engine's to say, and differs between its versions: its own pydantic model refuses it
before the model is loaded (`worker_agent/engines/trtllm/bindings.py` names layer and place).

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/llmapi/llm_args.py` (`TorchLlmArgs`, `BaseLlmArgs`, and each section's class)
and `tensorrt_llm/usage/llm_args_golden_manifest.json`, both at commit 0004396720054fd8e205cbf616f21f0b57c6b412; for
`_autodeploy` `tensorrt_llm/_torch/auto_deploy/llm_args.py` (`LlmArgs`) at 01e5db066ef7277ca4d709cfa0c10e96a688c49a. All
of them refuse names that they do not know (`extra="forbid"`).
"""

from worker_agent.engine_args.field_kinds import BACKENDS, Field, integer, section, text
from worker_agent.engine_args.layers import Path

_BOOLEAN = Field(kind="boolean")
_COUNT = integer(1)
_WORLD_SIZE = "it shards by `world_size` alone"
_ONLY_AUTODEPLOY = "only `_autodeploy` knows it"
_MOE_SIZE = integer(1, also=(-1,)).or_null().not_in("_autodeploy", _WORLD_SIZE)
_BLOCK_SIZES = tuple(1 << power for power in range(1, 13))
"""A power of two above 1: `docs/SOURCES.md` E1.1; the largest is the fleet's own bound."""


def _texts(names: str) -> dict[str, Field]:
    return dict.fromkeys(names.split(), text().or_null())


def _others(names: str) -> dict[str, Field]:
    return dict.fromkeys(names.split(), Field(kind="anything"))


_KV_CACHE = section(
    block_reuse_config=section(**_texts("policy"), **_others("max_num_turns")),
    dtype=text(),
    enable_block_reuse=_BOOLEAN,
    enable_partial_reuse=_BOOLEAN,
    event_buffer_max_size=integer(0),
    kv_events_config=section(
        enable_kv_cache_events=_BOOLEAN,
        publisher=text("null", "zmq").or_null(),
        endpoint=text(),
        replay_endpoint=text().or_null(),
        topic=Field(kind="text", also=("",)),
        **_others("buffer_steps hwm max_queue_size"),
    ).or_null(),
    tokens_per_block=Field(kind="integer", choices=_BLOCK_SIZES),
    **_texts("disk_cache_path kv_cache_event_hash_algo mamba_ssm_cache_dtype"),
    **_others("""
        attention_dp_events_gather_period_ms avg_seq_len copy_on_partial_reuse cross_kv_cache_fraction disk_cache_size
        disk_prefetch_num_reqs enable_kv_pool_rebalance enable_swa_scratch_reuse fp8_context_mla_kv_len_cap
        free_gpu_memory_fraction host_cache_size iteration_stats_interval kv_pool_rebalance_check_interval
        kv_pool_rebalance_cooldown_secs kv_pool_rebalance_min_sampled_kv_caches kv_pool_rebalance_moving_average_decay
        kv_pool_rebalance_ratio_threshold kv_pool_rebalance_target_ratio_update_interval mamba_ssm_philox_rounds
        mamba_ssm_stochastic_rounding mamba_state_cache_interval mamba_state_config max_attention_window
        max_gpu_total_bytes max_tokens max_util_for_resume pool_ratio secondary_offload_min_priority sink_token_length
        use_kv_cache_manager_v2 use_uvm
    """),
)

_SECTIONS = {
    "attention_dp_config": section(
        **_others("""
        batching_wait_iters enable_balance enable_kv_cache_aware_routing kv_cache_routing_account_for_in_transfer
        kv_cache_routing_cold_start_warmup kv_cache_routing_conversation_affinity
        kv_cache_routing_fair_share_multiplier kv_cache_routing_load_balance_weight
        kv_cache_routing_match_rate_threshold kv_cache_routing_max_sessions timeout_iters
    """),
        **_texts("kv_cache_routing_new_conv_placement"),
    ).or_null(),
    "cache_transceiver_config": section(
        max_tokens_in_buffer=_COUNT.or_null(),
        **_texts("backend transceiver_runtime"),
        **_others("""
            enable_pipelined_transfer kv_cache_bounce_size_mb kv_transfer_poll_interval_ms
            kv_transfer_sender_future_timeout_ms kv_transfer_timeout_ms
        """),
    ).or_null(),
    "cp_config": section(**_texts("cp_type"), **_others("fifo_version tokens_per_block use_nccl_for_alltoall"))
    .or_null()
    .not_in("_autodeploy", _WORLD_SIZE),
    "cuda_graph_config": section(
        **_texts("mode"),
        **_others("batch_sizes enable_padding max_batch_size max_num_token max_seq_len num_tokens seq_lens"),
    ).or_null(),
    "kv_cache_config": _KV_CACHE,
    "kv_connector_config": section(
        **_texts("connector connector_module connector_scheduler_class connector_worker_class"),
    ).or_null(),
    "moe_config": section(
        **_texts("backend"),
        **_others("disable_finalize_fusion load_balancer max_num_tokens use_low_precision_moe_combine"),
    ),
    "nvfp4_gemm_config": section(**_others("allowed_backends")),
    "scheduler_config": section(
        dynamic_batch_config=section(
            **_others("dynamic_batch_moving_average_window enable_batch_size_tuning enable_max_num_tokens_tuning")
        ).or_null(),
        **_texts("capacity_scheduler_policy context_chunking_policy waiting_queue_policy"),
        **_others("enable_prefix_aware_scheduling use_python_scheduler"),
    ),
    "torch_compile_config": section(
        **_others("""
        capture_num_tokens enable_fullgraph enable_inductor enable_piecewise_cuda_graph enable_userbuffers
        max_num_streams
    """)
    ).or_null(),
}
"""Sections whose names are known."""

_READ = {
    "backend": text(*BACKENDS),
    "context_parallel_size": _COUNT.not_in("_autodeploy", _WORLD_SIZE),
    "enable_attention_dp": _BOOLEAN.not_in("_autodeploy", _WORLD_SIZE),
    "enable_chunked_prefill": _BOOLEAN,
    "enable_iter_perf_stats": _BOOLEAN,
    "enable_lora": _BOOLEAN,
    "gpus_per_node": _COUNT.or_null().not_in("_autodeploy", "it counts the GPUs itself"),
    "guided_decoding_backend": text().or_null(),
    "max_batch_size": _COUNT.or_null(),
    "max_num_tokens": _COUNT.or_null(),
    "max_seq_len": integer(2).or_null(),
    "model": text(),
    "model_kwargs": Field(kind="mapping").or_null(),
    "moe_cluster_parallel_size": _MOE_SIZE,
    "moe_expert_parallel_size": _MOE_SIZE,
    "moe_tensor_parallel_size": _MOE_SIZE,
    "pipeline_parallel_size": _COUNT.not_in("_autodeploy", _WORLD_SIZE),
    "tensor_parallel_size": _COUNT.not_in("_autodeploy", _WORLD_SIZE),
}

_AUTODEPLOY = {
    "runtime": text(),
    "world_size": integer(0),
    **_texts("compile_backend device mode model_factory"),
    **_others("""
        draft_checkpoint_loader skip_loading_weights speculative_model_kwargs tokenizer_kwargs transforms yaml_extra
    """),
}

ENGINE = section(
    **_READ,
    **_SECTIONS,
    **_texts("""
        allreduce_strategy attn_backend checkpoint_format checkpoint_io_policy custom_tokenizer dtype generation_config
        load_format orchestrator_type otlp_traces_endpoint perf_metrics_output_dir post_processor_hook
        postprocess_tokenizer_dir prefill_cuda_graph_backend ray_worker_extension_cls reasoning_parser revision
        sampler_type tokenizer tokenizer_mode tokenizer_revision
    """),
    **_others("""
        batch_wait_max_tokens_ratio batch_wait_timeout_iters batch_wait_timeout_ms disable_mm_encoder
        disable_overlap_scheduler dwdp_config enable_autotuner enable_early_first_token_response
        enable_encoder_decoder_mixed_cuda_graph enable_energy_metrics enable_in_graph_sampling enable_iter_req_stats
        enable_layerwise_nvtx_marker enable_lm_head_tp_in_adp enable_low_latency_host_dispatch enable_min_latency
        enable_mla_skip_correction enable_resource_governor enable_speculative_beam_history_d2h encode_only
        encoder_cuda_graph_config encoder_max_batch_size encoder_max_num_tokens env_overrides force_dynamic_quantization
        garbage_collection_gen0_threshold gather_generation_logits gms_config iter_stats_max_iterations
        kv_cache_compression_config layer_wise_benchmarks_config lora_config max_beam_width max_input_len max_stats_len
        mla_skip_correction_threshold mm_encoder_only multimodal_config mx_config num_postprocess_workers
        num_serve_frontends peft_cache_config perf_metrics_max_requests pp_partition prefill_capture_num_tokens
        print_iter_log prometheus_metrics_config ray_placement_config ray_worker_nsight_options reorder_policy_config
        request_stats_max_iterations return_perf_metrics sampler_force_async_worker skip_tokenizer_init sleep_config
        sparse_attention_config speculative_config stream_interval telemetry_config trust_remote_code
        use_cute_dsl_bf16_bmm use_cute_dsl_bf16_gemm use_cute_dsl_blockscaling_bmm use_cute_dsl_blockscaling_mm
        use_fine_grained_sync
    """),
    **{name: field.not_in("pytorch", _ONLY_AUTODEPLOY) for name, field in _AUTODEPLOY.items()},
)


def field_at(path: Path) -> Field | None:
    """Return the field of the argument at `path`; None if it is unknown."""
    field: Field | None = ENGINE
    for name in path:
        field = field.fields.get(name) if field else None
    return field
