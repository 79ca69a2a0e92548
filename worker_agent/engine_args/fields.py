"""The engine's arguments that are checked before the engine is loaded: names, types, ranges, classes, backends.

`ENGINE` names every argument that TensorRT-LLM's PyTorch arguments have, so that a misspelt one is found at once;
within the sections whose fields stand here, those too. What is a `mapping()` or `anything()` is known by name alone,
its contents are the engine's business.

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/llmapi/llm_args.py` (`TorchLlmArgs`, `BaseLlmArgs`, and each section's class)
and `tensorrt_llm/usage/llm_args_golden_manifest.json`, both at commit 0004396720054fd8e205cbf616f21f0b57c6b412; for
`_autodeploy` `tensorrt_llm/_torch/auto_deploy/llm_args.py` (`LlmArgs`) at 01e5db066ef7277ca4d709cfa0c10e96a688c49a. All
of them refuse names that they do not know (`extra="forbid"`). Where the source states no range, and the number is a
count of devices, requests or tokens, 1 or more is allowed: the engine fails later on anything less.
"""

from worker_agent.engine_args.field_kinds import (
    BACKENDS,
    Field,
    boolean,
    integer,
    listing,
    mapping,
    number,
    section,
    text,
)
from worker_agent.engine_args.layers import Path

_COUNT = integer(1)
_WORLD_SIZE = "it shards by `world_size` alone"
_ONLY_AUTODEPLOY = "only `_autodeploy` knows it"
_MOE_SIZE = integer(1, also=(-1,)).or_null().not_in("_autodeploy", _WORLD_SIZE)
_ANYTHING = Field(kind="anything")
_BLOCK_SIZES = tuple(1 << power for power in range(1, 13))
"""A power of two above 1: `docs/SOURCES.md` E1.1; the largest is the fleet's own bound."""

_KV_CACHE = section(
    "KvCacheConfig",
    attention_dp_events_gather_period_ms=integer(1),
    avg_seq_len=_COUNT.or_null(),
    block_reuse_config=section(
        "BlockReuseConfig",
        policy=text("all_reusable", "per_request", "per_conversation"),
        max_num_turns=_COUNT,
    ),
    copy_on_partial_reuse=boolean(),
    cross_kv_cache_fraction=number(0, 1).or_null(),
    disk_cache_path=text().or_null(),
    disk_cache_size=integer(0).or_null(),
    disk_prefetch_num_reqs=integer(0),
    dtype=text("auto", "float16", "bfloat16", "float32", "fp8", "fp8_ds_mla", "nvfp4", any_case=True),
    enable_block_reuse=boolean(),
    enable_kv_pool_rebalance=boolean(),
    enable_partial_reuse=boolean(),
    enable_swa_scratch_reuse=boolean(),
    event_buffer_max_size=integer(0),
    fp8_context_mla_kv_len_cap=_COUNT.or_null(),
    free_gpu_memory_fraction=number(0, 1).or_null(),
    host_cache_size=integer(0).or_null(),
    iteration_stats_interval=_COUNT,
    kv_cache_event_hash_algo=text("auto", "v1_block_key", "v2_sha256", "v2_sha256_64"),
    kv_events_config=section(
        "KVEventsConfig",
        enable_kv_cache_events=boolean(),
        publisher=text("null", "zmq").or_null(),
        endpoint=text(),
        replay_endpoint=text().or_null(),
        buffer_steps=_COUNT,
        hwm=_COUNT,
        max_queue_size=_COUNT,
        topic=Field(kind="text", also=("",)),
    ).or_null(),
    kv_pool_rebalance_check_interval=_COUNT,
    kv_pool_rebalance_cooldown_secs=number(0),
    kv_pool_rebalance_min_sampled_kv_caches=integer(0),
    kv_pool_rebalance_moving_average_decay=number(0, 1),
    kv_pool_rebalance_ratio_threshold=number(above=1),
    kv_pool_rebalance_target_ratio_update_interval=_COUNT,
    mamba_ssm_cache_dtype=text("auto", "float16", "bfloat16", "float32"),
    mamba_ssm_philox_rounds=_COUNT,
    mamba_ssm_stochastic_rounding=boolean(),
    mamba_state_cache_interval=integer(0).or_null(),
    mamba_state_config=mapping("MambaStateConfig"),
    max_attention_window=listing(integer()).or_null(),
    max_gpu_total_bytes=integer(0),
    max_tokens=_COUNT.or_null(),
    max_util_for_resume=number(above=0, most=1),
    pool_ratio=listing(number(above=0, most=1)).or_null(),
    secondary_offload_min_priority=integer(0, 100).or_null(),
    sink_token_length=integer(0).or_null(),
    tokens_per_block=Field(kind="integer", choices=_BLOCK_SIZES),
    use_kv_cache_manager_v2=boolean(also=("auto",)),
    use_uvm=boolean(),
)

_SCHEDULER = section(
    "SchedulerConfig",
    capacity_scheduler_policy=text("MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"),
    context_chunking_policy=text("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", "FORCE_CHUNK").or_null(),
    dynamic_batch_config=section(
        "DynamicBatchConfig",
        enable_batch_size_tuning=boolean(),
        enable_max_num_tokens_tuning=boolean(),
        dynamic_batch_moving_average_window=_COUNT,
    ).or_null(),
    enable_prefix_aware_scheduling=boolean(),
    use_python_scheduler=boolean(),
    waiting_queue_policy=text("fcfs", "priority"),
)

_CACHE_TRANSCEIVER = section(
    "CacheTransceiverConfig",
    backend=text("DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI").or_null(),
    enable_pipelined_transfer=boolean(),
    kv_cache_bounce_size_mb=integer(0),
    kv_transfer_poll_interval_ms=_COUNT.or_null(),
    kv_transfer_sender_future_timeout_ms=_COUNT.or_null(),
    kv_transfer_timeout_ms=_COUNT.or_null(),
    max_tokens_in_buffer=_COUNT.or_null(),
    transceiver_runtime=text("CPP", "PYTHON", "auto").or_null(),
).or_null()

_MOE = section(
    "MoeConfig",
    backend=text(
        "AUTO", "CUTLASS", "CUTEDSL", "TRTLLM", "DEEPGEMM", "DENSEGEMM", "VANILLA", "TRITON", "MARLIN",
        "MEGAMOE_DEEPGEMM", "MEGAMOE_CUTEDSL", "WIDEEP",
    ),
    disable_finalize_fusion=boolean(),
    load_balancer=_ANYTHING,
    max_num_tokens=_COUNT.or_null(),
    use_low_precision_moe_combine=boolean(),
)  # fmt: skip

_ATTENTION_DP = section(
    "AttentionDpConfig",
    batching_wait_iters=integer(0),
    enable_balance=boolean(),
    enable_kv_cache_aware_routing=boolean(),
    kv_cache_routing_account_for_in_transfer=boolean(),
    kv_cache_routing_cold_start_warmup=boolean(),
    kv_cache_routing_conversation_affinity=boolean(),
    kv_cache_routing_fair_share_multiplier=number(),
    kv_cache_routing_load_balance_weight=number(),
    kv_cache_routing_match_rate_threshold=number(),
    kv_cache_routing_max_sessions=_COUNT,
    kv_cache_routing_new_conv_placement=text("round_robin", "least_queued"),
    timeout_iters=integer(0),
).or_null()

_CUDA_GRAPH = section(
    "CudaGraphConfig",
    batch_sizes=listing(_COUNT).or_null(),
    enable_padding=boolean(),
    max_batch_size=integer(0),
    max_num_token=integer(0),
    max_seq_len=integer(0),
    mode=text("decode", "encode"),
    num_tokens=listing(_COUNT).or_null(),
    seq_lens=listing(_COUNT).or_null(),
).or_null()

_AUTODEPLOY = {
    "compile_backend": text(),
    "device": text(),
    "draft_checkpoint_loader": _ANYTHING,
    "mode": text("graph", "transformers", "export_edgellm_onnx"),
    "model_factory": text(),
    "runtime": text("demollm", "trtllm"),
    "skip_loading_weights": boolean(),
    "speculative_model_kwargs": mapping(),
    "tokenizer_kwargs": mapping(),
    "transforms": mapping(),
    "world_size": integer(0),
    "yaml_extra": _ANYTHING,
}

ENGINE = section(
    "",
    allreduce_strategy=text(
        "AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC"
    ).or_null(),
    attention_dp_config=_ATTENTION_DP,
    attn_backend=text(),
    backend=text(*BACKENDS),
    batch_wait_max_tokens_ratio=number(0, 1),
    batch_wait_timeout_iters=integer(0),
    batch_wait_timeout_ms=number(0),
    cache_transceiver_config=_CACHE_TRANSCEIVER,
    checkpoint_format=text().or_null(),
    checkpoint_io_policy=text("auto", "native", "rank_striped_read_ahead"),
    context_parallel_size=_COUNT.not_in("_autodeploy", _WORLD_SIZE),
    cp_config=section(
        "CpConfig",
        cp_type=text("ULYSSES", "RING", "HELIX", any_case=True),
        fifo_version=integer().or_null(),
        tokens_per_block=Field(kind="integer", choices=_BLOCK_SIZES, nullable=True),
        use_nccl_for_alltoall=boolean().or_null(),
    ).or_null().not_in("_autodeploy", _WORLD_SIZE),
    cuda_graph_config=_CUDA_GRAPH,
    custom_tokenizer=text().or_null(),
    disable_mm_encoder=boolean(),
    disable_overlap_scheduler=boolean(),
    dtype=text(),
    dwdp_config=mapping("DwdpConfig").or_null(),
    enable_attention_dp=boolean().not_in("_autodeploy", _WORLD_SIZE),
    enable_autotuner=boolean(),
    enable_chunked_prefill=boolean(),
    enable_early_first_token_response=boolean(),
    enable_encoder_decoder_mixed_cuda_graph=boolean(),
    enable_energy_metrics=boolean(),
    enable_in_graph_sampling=boolean(),
    enable_iter_perf_stats=boolean(),
    enable_iter_req_stats=boolean(),
    enable_layerwise_nvtx_marker=boolean(),
    enable_lm_head_tp_in_adp=boolean(),
    enable_lora=boolean(),
    enable_low_latency_host_dispatch=boolean(),
    enable_min_latency=boolean(),
    enable_mla_skip_correction=boolean(),
    enable_resource_governor=boolean(),
    enable_speculative_beam_history_d2h=boolean(),
    encode_only=boolean(),
    encoder_cuda_graph_config=mapping("EncodeCudaGraphConfig").or_null(),
    encoder_max_batch_size=_COUNT.or_null(),
    encoder_max_num_tokens=_COUNT.or_null(),
    env_overrides=mapping().or_null(),
    force_dynamic_quantization=boolean(),
    garbage_collection_gen0_threshold=integer(0),
    gather_generation_logits=boolean(),
    generation_config=text("auto", "trtllm"),
    gms_config=mapping("GmsConfig"),
    gpus_per_node=_COUNT.or_null().not_in("_autodeploy", "it counts the GPUs itself"),
    guided_decoding_backend=text("xgrammar", "llguidance").or_null(),
    iter_stats_max_iterations=integer(-1).or_null(),
    kv_cache_compression_config=mapping().or_null(),
    kv_cache_config=_KV_CACHE,
    kv_connector_config=section(
        "KvCacheConnectorConfig",
        connector=text().or_null(),
        connector_module=text().or_null(),
        connector_scheduler_class=text().or_null(),
        connector_worker_class=text().or_null(),
    ).or_null(),
    layer_wise_benchmarks_config=mapping("LayerwiseBenchmarksConfig"),
    load_format=text("auto", "dummy", "vision_only", "gms", any_case=True),
    lora_config=mapping("LoraConfig").or_null(),
    max_batch_size=_COUNT.or_null(),
    max_beam_width=_COUNT.or_null(),
    max_input_len=_COUNT.or_null(),
    max_num_tokens=_COUNT.or_null(),
    max_seq_len=integer(2).or_null(),
    max_stats_len=integer(-1),
    mla_skip_correction_threshold=number(above=0, most=32),
    mm_encoder_only=boolean(),
    model=text(),
    model_kwargs=mapping().or_null(),
    moe_cluster_parallel_size=_MOE_SIZE,
    moe_config=_MOE,
    moe_expert_parallel_size=_MOE_SIZE,
    moe_tensor_parallel_size=_MOE_SIZE,
    multimodal_config=mapping("MultimodalConfig").or_null(),
    mx_config=mapping("ModelExpressConfig"),
    num_postprocess_workers=integer(0),
    num_serve_frontends=integer(1, 64),
    nvfp4_gemm_config=section(
        "Nvfp4GemmConfig",
        allowed_backends=listing(text("cutlass", "cublaslt", "cutedsl", "cuda_core", "marlin")),
    ),
    orchestrator_type=text("rpc", "ray").or_null(),
    otlp_traces_endpoint=text().or_null(),
    peft_cache_config=mapping("PeftCacheConfig").or_null(),
    perf_metrics_max_requests=integer(0),
    perf_metrics_output_dir=text().or_null(),
    pipeline_parallel_size=_COUNT.not_in("_autodeploy", _WORLD_SIZE),
    post_processor_hook=text().or_null(),
    postprocess_tokenizer_dir=text().or_null(),
    pp_partition=listing(_COUNT).or_null(),
    prefill_capture_num_tokens=listing(_COUNT).or_null(),
    prefill_cuda_graph_backend=text("disabled", "piecewise", "breakable"),
    print_iter_log=boolean(),
    prometheus_metrics_config=mapping("PrometheusMetricsConfig").or_null(),
    ray_placement_config=mapping("RayPlacementConfig").or_null(),
    ray_worker_extension_cls=text().or_null(),
    ray_worker_nsight_options=mapping().or_null(),
    reasoning_parser=text().or_null(),
    reorder_policy_config=mapping("ReorderRequestPolicyConfig").or_null(),
    request_stats_max_iterations=integer(-1).or_null(),
    return_perf_metrics=boolean(),
    revision=text().or_null(),
    sampler_force_async_worker=boolean(),
    sampler_type=text("auto", "TorchSampler"),  # removed, but taken still; any other is refused
    scheduler_config=_SCHEDULER,
    skip_tokenizer_init=boolean(),
    sleep_config=mapping("SleepConfig").or_null(),
    sparse_attention_config=mapping().or_null(),
    speculative_config=mapping().or_null(),
    stream_interval=_COUNT,
    telemetry_config=mapping("TelemetryConfig"),
    tensor_parallel_size=_COUNT.not_in("_autodeploy", _WORLD_SIZE),
    tokenizer=text().or_null(),
    tokenizer_mode=text("auto", "slow"),
    tokenizer_revision=text().or_null(),
    torch_compile_config=section(
        "TorchCompileConfig",
        capture_num_tokens=listing(_COUNT).or_null(),
        enable_fullgraph=boolean(),
        enable_inductor=boolean(),
        enable_piecewise_cuda_graph=boolean(),
        enable_userbuffers=boolean(),
        max_num_streams=_COUNT,
    ).or_null(),
    trust_remote_code=boolean(),
    use_cute_dsl_bf16_bmm=boolean(),
    use_cute_dsl_bf16_gemm=boolean(),
    use_cute_dsl_blockscaling_bmm=boolean(),
    use_cute_dsl_blockscaling_mm=boolean(),
    use_fine_grained_sync=boolean(),
    **{name: field.not_in("pytorch", _ONLY_AUTODEPLOY) for name, field in _AUTODEPLOY.items()},
)  # fmt: skip


def field_at(path: Path) -> Field | None:
    """Return what the argument at `path` may be; None where it is not known."""
    field: Field | None = ENGINE
    for name in path:
        field = field.fields.get(name) if field else None
    return field


CLASS_BY_TYPE = {
    "speculative_config": (
        "decoding_type",
        {
            "AUTO": "AutoDecodingConfig",
            "DFlash": "DFlashDecodingConfig",
            "DSpark": "DSparkDecodingConfig",
            "Draft_Target": "DraftTargetDecodingConfig",
            "Eagle": "EagleDecodingConfig",
            "Eagle3": "Eagle3DecodingConfig",
            "MTP": "MTPDecodingConfig",
            "NGram": "NGramDecodingConfig",
            "PARD": "PARDDecodingConfig",
            "SA": "SADecodingConfig",
            "SaveState": "SaveHiddenStatesDecodingConfig",
            "User_Provided": "UserProvidedDecodingConfig",
        },
    ),
    "sparse_attention_config": (
        "algorithm",
        {
            "deepseek_v4": "DeepSeekV4SparseAttentionConfig",
            "dsa": "DeepSeekSparseAttentionConfig",
            "minimax_m3": "MiniMaxM3SparseAttentionConfig",
            "qsa": "QSASparseAttentionConfig",
            "rocket": "RocketSparseAttentionConfig",
            "skip_softmax": "SkipSoftmaxAttentionConfig",
        },
    ),
    "cuda_graph_config": ("mode", {"decode": "CudaGraphConfig", "encode": "EncodeCudaGraphConfig"}),
}
"""Sections whose class is named by one of their own values. Source: as above, the `Literal` of each class."""
