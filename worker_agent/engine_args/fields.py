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

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from worker_agent.engine_args.findings import ArgumentFinding, found, shown
from worker_agent.engine_args.layers import Path, Values, at, dotted, origin_of

Backend = Literal["pytorch", "_autodeploy"]

_Count = Annotated[int, Meta(ge=1)]
_Text = Annotated[str, Meta(min_length=1)]
_MoeSize = Annotated[int, Meta(ge=-1)] | None
_READ: dict[str, Any] = {
    "backend": Backend,
    "cache_transceiver_config.max_tokens_in_buffer": _Count | None,
    "context_parallel_size": _Count,
    "enable_attention_dp": bool,
    "enable_chunked_prefill": bool,
    "enable_iter_perf_stats": bool,
    "enable_lora": bool,
    "gpus_per_node": _Count | None,
    "kv_cache_config.enable_block_reuse": bool,
    "kv_cache_config.enable_partial_reuse": bool,
    "kv_cache_config.event_buffer_max_size": Annotated[int, Meta(ge=0)],
    "kv_cache_config.kv_events_config.enable_kv_cache_events": bool,
    "kv_cache_config.tokens_per_block": Literal[2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096],
    "max_batch_size": _Count | None,
    "max_num_tokens": _Count | None,
    "max_seq_len": Annotated[int, Meta(ge=2)] | None,
    "model": _Text,
    "model_kwargs": dict[Any, Any] | None,
    "moe_cluster_parallel_size": _MoeSize,
    "moe_expert_parallel_size": _MoeSize,
    "moe_tensor_parallel_size": _MoeSize,
    "pipeline_parallel_size": _Count,
    "tensor_parallel_size": _Count,
    "world_size": Annotated[int, Meta(ge=0)],
}
"""A block is a power of two above 1: `docs/SOURCES.md` E1.1; the largest is the fleet's own bound."""

_TEXTS = {
    "": """
        allreduce_strategy attn_backend checkpoint_format checkpoint_io_policy compile_backend custom_tokenizer device
        dtype generation_config guided_decoding_backend load_format mode model_factory orchestrator_type
        otlp_traces_endpoint perf_metrics_output_dir post_processor_hook postprocess_tokenizer_dir
        prefill_cuda_graph_backend ray_worker_extension_cls reasoning_parser revision runtime sampler_type tokenizer
        tokenizer_mode tokenizer_revision
    """,
    "attention_dp_config": "kv_cache_routing_new_conv_placement",
    "cache_transceiver_config": "backend transceiver_runtime",
    "cp_config": "cp_type",
    "cuda_graph_config": "mode",
    "kv_cache_config": "disk_cache_path dtype kv_cache_event_hash_algo mamba_ssm_cache_dtype",
    "kv_cache_config.block_reuse_config": "policy",
    "kv_cache_config.kv_events_config": "endpoint replay_endpoint",
    "kv_connector_config": "connector connector_module connector_scheduler_class connector_worker_class",
    "moe_config": "backend",
    "scheduler_config": "capacity_scheduler_policy context_chunking_policy waiting_queue_policy",
}
_OTHERS = {
    "": """
        batch_wait_max_tokens_ratio batch_wait_timeout_iters batch_wait_timeout_ms disable_mm_encoder
        disable_overlap_scheduler draft_checkpoint_loader dwdp_config enable_autotuner enable_early_first_token_response
        enable_encoder_decoder_mixed_cuda_graph enable_energy_metrics enable_in_graph_sampling enable_iter_req_stats
        enable_layerwise_nvtx_marker enable_lm_head_tp_in_adp enable_low_latency_host_dispatch enable_min_latency
        enable_mla_skip_correction enable_resource_governor enable_speculative_beam_history_d2h encode_only
        encoder_cuda_graph_config encoder_max_batch_size encoder_max_num_tokens env_overrides force_dynamic_quantization
        garbage_collection_gen0_threshold gather_generation_logits gms_config iter_stats_max_iterations
        kv_cache_compression_config layer_wise_benchmarks_config lora_config max_beam_width max_input_len max_stats_len
        mla_skip_correction_threshold mm_encoder_only multimodal_config mx_config num_postprocess_workers
        num_serve_frontends peft_cache_config perf_metrics_max_requests pp_partition prefill_capture_num_tokens
        print_iter_log prometheus_metrics_config ray_placement_config ray_worker_nsight_options reorder_policy_config
        request_stats_max_iterations return_perf_metrics sampler_force_async_worker skip_loading_weights
        skip_tokenizer_init sleep_config sparse_attention_config speculative_config speculative_model_kwargs
        stream_interval telemetry_config tokenizer_kwargs transforms trust_remote_code use_cute_dsl_bf16_bmm
        use_cute_dsl_bf16_gemm use_cute_dsl_blockscaling_bmm use_cute_dsl_blockscaling_mm use_fine_grained_sync
        yaml_extra
    """,
    "attention_dp_config": """
        batching_wait_iters enable_balance enable_kv_cache_aware_routing kv_cache_routing_account_for_in_transfer
        kv_cache_routing_cold_start_warmup kv_cache_routing_conversation_affinity
        kv_cache_routing_fair_share_multiplier kv_cache_routing_load_balance_weight
        kv_cache_routing_match_rate_threshold kv_cache_routing_max_sessions timeout_iters
    """,
    "cache_transceiver_config": """
        enable_pipelined_transfer kv_cache_bounce_size_mb kv_transfer_poll_interval_ms
        kv_transfer_sender_future_timeout_ms kv_transfer_timeout_ms
    """,
    "cp_config": "fifo_version tokens_per_block use_nccl_for_alltoall",
    "cuda_graph_config": "batch_sizes enable_padding max_batch_size max_num_token max_seq_len num_tokens seq_lens",
    "kv_cache_config": """
        attention_dp_events_gather_period_ms avg_seq_len copy_on_partial_reuse cross_kv_cache_fraction disk_cache_size
        disk_prefetch_num_reqs enable_kv_pool_rebalance enable_swa_scratch_reuse fp8_context_mla_kv_len_cap
        free_gpu_memory_fraction host_cache_size iteration_stats_interval kv_pool_rebalance_check_interval
        kv_pool_rebalance_cooldown_secs kv_pool_rebalance_min_sampled_kv_caches kv_pool_rebalance_moving_average_decay
        kv_pool_rebalance_ratio_threshold kv_pool_rebalance_target_ratio_update_interval mamba_ssm_philox_rounds
        mamba_ssm_stochastic_rounding mamba_state_cache_interval mamba_state_config max_attention_window
        max_gpu_total_bytes max_tokens max_util_for_resume pool_ratio secondary_offload_min_priority sink_token_length
        use_kv_cache_manager_v2 use_uvm
    """,
    "kv_cache_config.block_reuse_config": "max_num_turns",
    "kv_cache_config.kv_events_config": "buffer_steps hwm max_queue_size publisher topic",
    "moe_config": "disable_finalize_fusion load_balancer max_num_tokens use_low_precision_moe_combine",
    "nvfp4_gemm_config": "allowed_backends",
    "scheduler_config": "enable_prefix_aware_scheduling use_python_scheduler",
    "scheduler_config.dynamic_batch_config": """
        dynamic_batch_moving_average_window enable_batch_size_tuning enable_max_num_tokens_tuning
    """,
    "torch_compile_config": """
        capture_num_tokens enable_fullgraph enable_inductor enable_piecewise_cuda_graph enable_userbuffers
        max_num_streams
    """,
}


def _path(name: str) -> Path:
    return tuple(name.split("."))


def _paths(names: dict[str, str]) -> set[Path]:
    return {_path(f"{above}.{name}".lstrip(".")) for above, within in names.items() for name in within.split()}


TEXTS = _paths(_TEXTS)
_SECTIONS = {_path(name) for name in {**_TEXTS, **_OTHERS} if name}
_TYPES: dict[Path, Any] = dict.fromkeys(TEXTS, _Text | None) | {_path(name): kind for name, kind in _READ.items()}
_NAMES = _SECTIONS | _TYPES.keys() | _paths(_OTHERS)

_ONLY_AUTODEPLOY = """
    compile_backend device draft_checkpoint_loader mode model_factory runtime skip_loading_weights
    speculative_model_kwargs tokenizer_kwargs transforms world_size yaml_extra
"""
_SHARDS = """
    context_parallel_size cp_config enable_attention_dp moe_cluster_parallel_size moe_expert_parallel_size
    moe_tensor_parallel_size pipeline_parallel_size tensor_parallel_size
"""
LACKS: dict[Backend, dict[str, str]] = {
    "pytorch": dict.fromkeys(_ONLY_AUTODEPLOY.split(), "only `_autodeploy` knows it"),
    "_autodeploy": {
        **dict.fromkeys(_SHARDS.split(), "it shards by `world_size` alone"),
        "gpus_per_node": "it counts the GPUs itself",
    },
}
"""The arguments that a backend does not get, and why."""


def layer_findings(layer: Values, *, allows_unknown: bool) -> Iterator[ArgumentFinding]:
    """Yield the unknown names of a layer, and its values of a wrong type or out of range."""
    heads = dict.fromkeys(
        next((path[:n] for n in range(1, len(path)) if path[:n] not in _SECTIONS), path) for path in layer
    )
    for path in heads:
        value, origin = at(layer, *path), origin_of(layer, path)
        place = "" if origin is None else origin.place
        if path not in _NAMES:
            yield _unknown(place, path, allows_unknown=allows_unknown)
        elif expected := _expected(path, value):
            what = found(shown(path, value))
            yield ArgumentFinding(severity="error", place=place, path=path, expected=expected, found=what)


def _expected(path: Path, value: object) -> str:
    """Return what is allowed at the path; empty where the value is."""
    if path in _SECTIONS:
        return "" if value is None or value == {} else "a mapping of names"
    kind = _TYPES.get(path, Any)
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if get_origin(kind) is Literal:
            return f"one of {', '.join(map(str, get_args(kind)))}"
        return str(error).partition(", got ")[0].removeprefix("Expected ").replace("`", "")
    return ""


def _unknown(place: str, path: Path, *, allows_unknown: bool) -> ArgumentFinding:
    near = get_close_matches(path[-1], [each[-1] for each in _NAMES if each[:-1] == path[:-1]], n=1)
    of = dotted(path[:-1]) or "the engine"
    return ArgumentFinding(
        severity="warning" if allows_unknown else "error",
        place=place,
        path=path,
        expected=f"an argument of {of}" + (f" (is it {near[0]}?)" if near else ""),
        found="a name that is not known here" + ("; passed on" if allows_unknown else ""),
    )
