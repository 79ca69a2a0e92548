"""Every file of `configs/engines/`, through the agent's precedence and the classes of the engine, as in `serve`."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from kv_protocol.fleet import Role
from tests.support.paths import ROOT
from tests.support.trtllm import Fake, trtllm
from worker_agent.engine_args.arguments import EngineArgs, EngineOptions
from worker_agent.engine_args.layers import EngineArgsInvalid
from worker_agent.engine_args.sources import check_files, load_engine_args

__all__ = ["trtllm"]
ENGINES = ROOT / "configs" / "engines"
LOAD_BALANCER = "deepseek-r1/eplb-288.yaml"
"""Read by the engine, and no file of arguments."""


class Facts(NamedTuple):
    """What a file is for: role, GPUs, KV caches, and whether prompts have images."""

    role: Role
    gpus: int
    ranks: int = 1
    is_multimodal: bool = False


AGG, PREFILL, DECODE = (Facts(role, 1) for role in ("aggregated", "prefill", "decode"))
FILES = {
    "default.yaml": AGG,
    "gpt-oss-120b/agg.yaml": Facts("aggregated", 4, 4),
    "gpt-oss-120b/agg-fp8-kv.yaml": Facts("aggregated", 4, 4),
    "gpt-oss-120b/prefill.yaml": Facts("prefill", 4),
    "gpt-oss-120b/prefill-fp8-kv.yaml": Facts("prefill", 4),
    "gpt-oss-120b/decode.yaml": Facts("decode", 4, 4),
    "gpt-oss-120b/decode-fp8-kv.yaml": Facts("decode", 4, 4),
    "deepseek-r1/simple-prefill.yaml": Facts("prefill", 8, 8),
    "deepseek-r1/simple-decode.yaml": Facts("decode", 8, 8),
    "deepseek-r1/wide-ep-prefill.yaml": Facts("prefill", 16, 16),
    "deepseek-r1/wide-ep-decode.yaml": Facts("decode", 16, 16),
    "qwen3/agg.yaml": AGG,
    "qwen3/prefill.yaml": PREFILL,
    "qwen3/decode.yaml": DECODE,
    "qwen3/lora.yaml": AGG,
    "gemma3/agg.yaml": AGG,
    "gemma3/prefill.yaml": PREFILL,
    "gemma3/decode.yaml": DECODE,
    "llama4/eagle-agg.yaml": Facts("aggregated", 4),
    "llama4/eagle-prefill.yaml": Facts("prefill", 4),
    "llama4/eagle-decode.yaml": Facts("decode", 4),
    "llava/agg.yaml": Facts("aggregated", 1, is_multimodal=True),
    "llava/encode.yaml": Facts("encode", 1, is_multimodal=True),
    "llava/prefill.yaml": Facts("prefill", 1, is_multimodal=True),
    "llava/decode.yaml": Facts("decode", 1, is_multimodal=True),
}
WARNINGS: dict[str, list[str]] = {}
"""The warnings that a file is meant to have. None has any: each is a copy of what a worker should run with."""
WITH_CACHE = [name for name, facts in FILES.items() if facts.role != "encode"]
PAIRS = [(name, name.replace("prefill", "decode")) for name, facts in FILES.items() if facts.role == "prefill"]


def loaded(name: str, **flags: Any) -> EngineArgs:
    facts = FILES[name]
    options = EngineOptions(
        flags=flags,
        extra=str(ENGINES / name),
        role=facts.role,
        publishes_kv_events=facts.role != "encode",
        is_multimodal=facts.is_multimodal,
        gpu_count=facts.gpus,
    )
    return load_engine_args(options)


def test_the_table_has_every_file() -> None:
    found = {str(file.relative_to(ENGINES)) for file in ENGINES.rglob("*.yaml")}
    assert found == {*FILES, LOAD_BALANCER}


@pytest.mark.parametrize("name", FILES)
def test_it_loads_with_the_warnings_it_is_meant_to_have(name: str) -> None:
    args, facts = loaded(name), FILES[name]
    assert [str(warning) for warning in args.warnings] == WARNINGS.get(name, [])
    assert (args.world_size, args.attention_dp_size) == (facts.gpus, facts.ranks)


@pytest.mark.parametrize("name", FILES)
def test_the_engine_s_own_classes_take_it(name: str, trtllm: Fake) -> None:
    built = trtllm.submodule("llmapi.llm_args").TorchLlmArgs(**loaded(name, model="org/model").as_dict())
    assert built.max_batch_size == yaml.safe_load((ENGINES / name).read_text())["max_batch_size"]


@pytest.mark.parametrize("name", WITH_CACHE)
def test_routing_can_see_what_it_holds(name: str) -> None:
    args = loaded(name)
    assert args.value("kv_cache_config", "enable_block_reuse") is True
    assert args.value("kv_cache_config", "event_buffer_max_size") == 100_000


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_both_sides_of_a_transfer_agree(prefill: str, decode: str) -> None:
    sides = [loaded(prefill), loaded(decode)]
    for path in (("kv_cache_config", "dtype"), ("kv_cache_config", "tokens_per_block"),
                 ("kv_cache_config", "max_attention_window"), ("cache_transceiver_config", "backend"),
                 ("speculative_config",), ("max_seq_len",)):  # fmt: skip
        first, second = (side.value(*path) for side in sides)
        assert first == second, path
    buffers = [side.value("cache_transceiver_config", "max_tokens_in_buffer") for side in sides]
    assert min(buffers) >= sides[0].value("max_seq_len") - 1


@pytest.mark.parametrize("role", ["agg", "prefill", "decode"])
def test_the_fp8_variants_differ_in_the_dtype_alone(role: str) -> None:
    plain, fp8 = (loaded(f"gpt-oss-120b/{role}{suffix}.yaml").as_dict() for suffix in ("", "-fp8-kv"))
    assert fp8["kv_cache_config"].pop("dtype") == "fp8"
    assert fp8 == plain


@pytest.mark.parametrize("name", [name for name in FILES if "wide-ep" in name])
def test_the_load_balancer_is_there_and_fits(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = loaded(name)
    monkeypatch.chdir(ROOT)
    check_files(args)
    slots = yaml.safe_load((ENGINES / LOAD_BALANCER).read_text())["num_slots"]
    assert slots % args.value("moe_expert_parallel_size") == 0
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngineArgsInvalid, match=r"moe_config\.load_balancer: expected a file, found 'configs/"):
        check_files(args)


def test_a_load_balancer_within_the_arguments_is_no_file(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("moe_config: {load_balancer: {num_slots: 288}}\n")
    check_files(load_engine_args(EngineOptions(extra=str(file))))
