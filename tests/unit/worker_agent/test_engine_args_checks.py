"""What no single argument shows, with the words in which it is told."""

from typing import Any

import pytest

from tests.unit.worker_agent.engine_arguments import effective, refused, warned
from worker_agent.engine_args.layers import MASK, shown

Args = dict[str, Any]
NIXL: Args = {"backend": "NIXL"}


def transceiver(buffer: int | None, **rest: Any) -> Args:
    sizes = {} if buffer is None else {"max_tokens_in_buffer": buffer}
    return {"cache_transceiver_config": {**NIXL, **sizes}, **rest}


# ---------------------------------------------------------------- block reuse
def test_reuse_off_under_event_publishing_is_load_balancing() -> None:
    off = {"kv_cache_config": {"enable_block_reuse": False}}
    assert warned(off, publishes_kv_events=True) == [
        (
            "engine.yaml: kv_cache_config.enable_block_reuse: expected true where KV events are published (without "
            "reuse there are none: the router only balances load), found false"
        )
    ]
    assert warned(off) == []
    assert warned({"kv_cache_config": {"enable_block_reuse": True}}, publishes_kv_events=True) == []


# ---------------------------------------------------------------- transceiver
def test_a_prefill_worker_s_buffer_holds_its_longest_input() -> None:
    assert refused(transceiver(8998, max_seq_len=9000), role="prefill") == [
        (
            "engine.yaml: cache_transceiver_config.max_tokens_in_buffer: expected 8999 or more, the longest input "
            "(max_seq_len - 1): a longer one is never transferred, found 8998"
        )
    ]
    assert warned(transceiver(8999, max_seq_len=9000), role="prefill") == []


def test_a_decode_worker_s_inputs_may_be_shorter_than_it_takes() -> None:
    (told,) = warned(transceiver(9216, max_seq_len=11_000), role="decode")
    assert "max_tokens_in_buffer: expected 10999 or more" in told


@pytest.mark.parametrize("args", [transceiver(None, max_seq_len=9000), transceiver(5)])
def test_a_buffer_or_a_length_that_is_not_given_is_not_judged(args: Args) -> None:
    assert warned(args, role="prefill") == []


def test_an_aggregated_worker_transfers_nothing() -> None:
    assert warned(transceiver(5, max_seq_len=9000)) == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_transfers_says_how(role: str) -> None:
    assert warned(role=role) == [
        (
            f"not given: cache_transceiver_config.backend: expected how a {role} worker's KV is transferred: NIXL, "
            "UCX, found nothing"
        )
    ]


# ---------------------------------------------------------------- parallelism
def test_an_engine_takes_no_more_gpus_than_there_are() -> None:
    args = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    assert refused(args, gpu_count=4) == [
        (
            "engine.yaml: tensor_parallel_size: expected at most 4 together, the GPUs there are, "
            "found tensor_parallel_size 4 x pipeline_parallel_size 2 = 8"
        )
    ]
    assert warned(args, gpu_count=8) == warned(args) == []
    assert effective(args).world_size == 8


def test_autodeploy_counts_gpus_by_its_world_size() -> None:
    args = {"backend": "_autodeploy", "world_size": 4}
    (told,) = refused(args, gpu_count=2)
    assert told == "engine.yaml: world_size: expected at most 2, the GPUs there are, found 4"
    assert effective(args, gpu_count=4).world_size == 4


def test_events_of_a_runtime_that_has_none_are_refused() -> None:
    args = {"backend": "_autodeploy", "runtime": "demollm"}
    (told,) = refused(args, publishes_kv_events=True)
    assert told.startswith("engine.yaml: runtime: expected another runtime where KV events are published")
    assert warned(args) == []


def test_an_encoder_s_gpus_are_counted_too() -> None:
    assert len(refused({"tensor_parallel_size": 2}, role="encode", gpu_count=1)) == 1


# ---------------------------------------------------------------- attention DP
def test_attention_dp_has_a_cache_for_each_tensor_parallel_rank() -> None:
    assert effective({"tensor_parallel_size": 4, "enable_attention_dp": True}).attention_dp_size == 4
    assert effective({"tensor_parallel_size": 4}).attention_dp_size == 1
    of_autodeploy = {"tensor_parallel_size": 4, "enable_attention_dp": True, "backend": "_autodeploy"}
    assert effective(of_autodeploy).attention_dp_size == 1


def test_attention_dp_with_one_rank_is_told() -> None:
    (told,) = warned({"enable_attention_dp": True})
    assert "enable_attention_dp: expected tensor_parallel_size above 1 with it (attention_dp_size is 1" in told


def test_more_attention_dp_ranks_than_a_worker_may_have_are_refused() -> None:
    (told,) = refused({"enable_attention_dp": True, "tensor_parallel_size": 4097})
    assert "tensor_parallel_size: expected an attention_dp_size of at most 4096" in told


def test_settings_of_attention_dp_without_it_are_ignored() -> None:
    settings = {"attention_dp_config": {"enable_balance": True}}
    (told,) = warned(settings)
    assert "attention_dp_config: expected enable_attention_dp with it (it is ignored), found a mapping" in told
    assert warned({**settings, "enable_attention_dp": True, "tensor_parallel_size": 2}) == []


# ---------------------------------------------------------------- versions
@pytest.mark.parametrize("version", ["1.2.1", "1.5.0rc1", "2.0", "unknown"])
def test_an_engine_outside_the_supported_versions_is_refused_with_what_is_allowed(version: str) -> None:
    told = f"tensorrt_llm: expected 1.3.0rc0 or later, below 1.5, found version {version}"
    assert refused(engine_version=version) == [told]
    assert warned(engine_version=version, allows_unknown=True) == [told]


def test_a_supported_engine_and_none_are_not_spoken_of() -> None:
    assert warned(engine_version="1.3.0rc29") == warned(engine_version="") == []


# ---------------------------------------------------------------- secrets
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("env_overrides.HF_TOKEN", "abc"),
        ("env_overrides.hfToken", "abc"),
        ("env_overrides.OPENAI_API_KEY", "abc"),
        ("model_kwargs.password", 12345),
        ("credentials.user", "abc"),
        ("model_kwargs.note", "hf_abcdefghijkl"),
        ("otlp_traces_endpoint", "https://user:pass@host/v1"),
    ],
)
def test_what_looks_like_a_secret_is_not_shown(path: str, value: Any) -> None:
    assert shown(tuple(path.split(".")), value) == MASK


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("max_num_tokens", 8192),
        ("kv_cache_config.tokens_per_block", 32),
        ("speculative_config.mask_token_id", 7),
        ("tokenizer", "some/model"),
        ("tokenizer_mode", "auto"),
        ("model", "meta-llama/Llama-3.1-8B"),
        ("kv_cache_config.kv_cache_event_hash_algo", "v1_block_key"),
        ("otlp_traces_endpoint", "http://host:4317"),
    ],
)
def test_what_merely_sounds_like_one_is(path: str, value: Any) -> None:
    assert shown(tuple(path.split(".")), value) == value


def test_a_secret_deep_in_a_value_is_not_shown_and_the_rest_is() -> None:
    value = {"a": [{"api_key": "k", "n": 1}], "b": "sk-abcdefghijkl"}
    assert shown(("model_kwargs",), value) == {"a": [{"api_key": MASK, "n": 1}], "b": MASK}


def test_a_secret_of_the_wrong_kind_is_not_told() -> None:
    (told,) = refused({"max_batch_size": "sk-abcdefghijkl"})
    assert "sk-" not in told
    assert MASK in told
