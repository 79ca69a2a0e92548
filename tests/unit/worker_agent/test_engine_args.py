"""What the engine gets: defaults, precedence, forced values, what is left out, and the classes of the sections."""

from typing import Any

import pytest

from tests.unit.worker_agent.engine_arguments import effective, refused, warned
from worker_agent.commands.print_engine_args import left_to_engine
from worker_agent.engine_args.arguments import DEFAULTS, ENCODE, EVENT_BUFFER_SIZE, EngineArgs

EVENTS: dict[str, Any] = {"publishes_kv_events": True}
MODEL = DEFAULTS["model",].value
BUFFER = ("kv_cache_config", "event_buffer_max_size")


def origin(args: EngineArgs, *path: str) -> str:
    """Return where the value is from; empty: there is none."""
    given = args.first(*path)
    return "" if given is None else given.origin


def test_the_engine_gets_nothing_that_neither_a_user_nor_a_rule_sets() -> None:
    args = effective()
    assert args.as_dict() == {"model": MODEL, "skip_tokenizer_init": True}
    assert {setting.layer for setting in args.settings} == {"default"}
    assert (args.warnings, args.replaced) == ((), ())


def test_what_is_left_to_the_engine_is_named_by_its_flags_arguments() -> None:
    left = left_to_engine(effective({"kv_cache_config": {"dtype": "fp8"}}, flags={"max-batch-size": 8}))
    assert ("kv_cache_config", "tokens_per_block") in left
    assert ("scheduler_config", "capacity_scheduler_policy") not in left
    assert {("max_batch_size",), ("model",), ("kv_cache_config", "dtype")} & {*left} == set()
    assert {*left_to_engine(effective(role="encode"))} == {("max_batch_size",), ("tensor_parallel_size",)}


def test_a_named_flag_sets_its_argument_over_the_default() -> None:
    args = effective(flags={"kv-block-size": 64})
    assert args.value("kv_cache_config", "tokens_per_block") == 64
    assert origin(args, "kv_cache_config", "tokens_per_block") == "flag (--kv-block-size)"


def test_default_gives_way_to_flag_to_file_to_override_and_forced_to_none() -> None:
    flags, file, override = {"max-batch-size": 1}, {"max_batch_size": 2}, {"max_batch_size": 3}
    layers = [effective(), effective(flags=flags), effective(file, flags=flags), effective(file, override, flags=flags)]
    assert [args.value("max_batch_size") for args in layers] == [None, 1, 2, 3]
    assert [origin(args, "max_batch_size") for args in layers] == [
        "",
        "flag (--max-batch-size)",
        "file (engine.yaml)",
        "override (--override-engine-args)",
    ]
    off = {"kv_cache_config": {"event_buffer_max_size": 0}}
    forced = effective(off, off, **EVENTS)
    assert (forced.value(*BUFFER), origin(forced, *BUFFER)) == (
        EVENT_BUFFER_SIZE,
        "forced (KV events are published)",
    )


# ---------------------------------------------------------------- forced
@pytest.mark.parametrize(("size", "published"), [(None, 100_000), (0, 100_000), (7, 7)])
def test_published_events_get_a_buffer_where_none_is_given(size: int | None, published: int) -> None:
    file = {"kv_cache_config": {} if size is None else {"event_buffer_max_size": size}}
    assert effective(file, **EVENTS).value(*BUFFER) == published
    assert effective(file).value(*BUFFER) == size


def test_published_events_are_polled_also_of_an_engine_that_would_stream_them() -> None:
    streams = ("kv_cache_config", "kv_events_config", "enable_kv_cache_events")
    streaming = {"kv_cache_config": {"kv_events_config": {"enable_kv_cache_events": True}}}
    args = effective(streaming, **EVENTS)
    assert (args.value(*BUFFER), args.value(*streams)) == (100_000, False)
    assert origin(args, *streams) == "forced (KV events are polled)"
    assert effective(streaming).value(*streams) is True


def test_kvbm_switches_partial_reuse_off_over_any_layer() -> None:
    on = {"kv_cache_config": {"enable_partial_reuse": True}}
    args = effective(on, connector="kvbm")
    assert args.value("kv_cache_config", "enable_partial_reuse") is False
    assert origin(args, "kv_cache_config", "enable_partial_reuse") == "forced (the connector is kvbm)"
    assert effective(on).value("kv_connector_config") is None
    assert effective(on).value("kv_cache_config", "enable_partial_reuse") is True


@pytest.mark.parametrize(
    ("version", "role", "given", "expected"),
    [
        ("1.3.0rc0", "prefill", {}, True),
        ("1.3.0rc0", "prefill", {"disable_overlap_scheduler": False}, True),
        ("1.3.0rc0", "decode", {}, None),
        ("1.3.0rc0", "aggregated", {}, None),
        ("1.3.0rc1", "prefill", {}, None),
        ("1.3.0rc1", "prefill", {"disable_overlap_scheduler": True}, True),
        ("", "prefill", {}, None),
    ],
)
def test_overlap_is_off_where_the_version_refuses_contexts_with_it(
    version: str, role: Any, given: dict[str, Any], expected: bool | None
) -> None:
    args = effective(given, role=role, engine_version=version)
    assert args.value("disable_overlap_scheduler") is expected
    if version == "1.3.0rc0" and expected:
        why = "TensorRT-LLM 1.3.0rc0 refuses context-only requests while the overlap scheduler is on"
        assert origin(args, "disable_overlap_scheduler") == f"forced ({why})"
        assert [old.name for old, _ in args.replaced] == list(given)


@pytest.mark.parametrize(
    ("file", "circumstances", "why"),
    [
        ({}, {"is_multimodal": True}, "the modality is multimodal"),
        ({}, {"has_logits_processors": True}, "logits processors are loaded"),
        ({"guided_decoding_backend": "llguidance"}, {}, "decoding is guided"),
    ],
)
def test_every_feature_that_needs_a_tokenizer_gets_one(
    file: dict[str, Any], circumstances: dict[str, Any], why: str
) -> None:
    args = effective({**file, "skip_tokenizer_init": True}, **circumstances)
    assert args.value("skip_tokenizer_init") is False
    assert origin(args, "skip_tokenizer_init") == f"forced ({why})"
    assert effective().value("skip_tokenizer_init") is True


# ---------------------------------------------------------------- left out
def test_the_agent_processes_the_output_itself() -> None:
    args = effective({"num_postprocess_workers": 4})
    assert args.value("num_postprocess_workers") is None
    assert [warning.path for warning in args.warnings] == [("num_postprocess_workers",)]


def test_an_encoder_gets_its_list_alone() -> None:
    given = {"trust_remote_code": True, "model_kwargs": {"a": 1}, "max_seq_len": 100, "max_batch_size": 4}
    args = effective(given, role="encode", **EVENTS)
    assert args.as_dict() == {
        "model": MODEL,
        "trust_remote_code": True,
        "model_kwargs": {"a": 1},
        "max_batch_size": 4,
    }
    assert set(args.as_dict()) < ENCODE
    assert [warning.path for warning in args.warnings] == [("max_seq_len",)]
    assert "expected nothing of an encode worker, which takes only max_batch_size, model, " in str(args.warnings[0])


# ---------------------------------------------------------------- types
@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ({"max_batch_size": "64"}, "max_batch_size: expected int | null, found '64' (a text)"),
        ({"max_batch_size": 0}, "max_batch_size: expected int >= 1, found 0 (an integer)"),
        ({"max_batch_size": True}, "expected int | null, found true (a boolean)"),
        ({"max_batch_size": {"a": 1}}, "max_batch_size: expected int | null, found a mapping"),
        ({"model": None}, "model: expected str, found null"),
        ({"model": ""}, "model: expected str of length >= 1, found '' (a text)"),
        ({"backend": "tensorrt"}, "backend: expected one of pytorch, _autodeploy, found 'tensorrt' (a text)"),
        ({"kv_cache_config": {"tokens_per_block": 48}}, "tokens_per_block: expected one of 2, 4, 8, 16, 32, 64"),
    ],
)
def test_what_an_argument_may_not_be_is_named(file: dict[str, Any], problem: str) -> None:
    (told,) = refused(file)
    assert told.startswith("engine.yaml: ")
    assert problem in told


@pytest.mark.parametrize(
    "file",
    [
        {"cuda_graph_config": None},
        {"kv_cache_config": {"free_gpu_memory_fraction": 1, "dtype": "FP8", "use_kv_cache_manager_v2": "auto"}},
        {"moe_config": {"load_balancer": "file.yaml"}},
        {"moe_expert_parallel_size": -1},
        {"load_format": "DUMMY", "kv_cache_config": 1, "newer": {"a": 1}},
        {"speculative_config": {"decoding_type": "MTP", "draft_len_schedule": {4: 2}}},
        {"kv_cache_config": {"kv_events_config": {"topic": "", "endpoint": "tcp://*:1"}}},
        {"kv_cache_config": {"free_gpu_memory_fraction": 1.5}, "moe_config": {"backend": "NEWER"}},
    ],
)
def test_what_the_engine_takes_is_taken(file: dict[str, Any]) -> None:
    assert warned(file) == []


def test_all_problems_of_all_layers_are_told_together() -> None:
    assert len(refused({"max_batch_size": 0, "max_seq_len": 1}, override={"model": 3})) == 3
