"""The fake against its `SURFACE.md`, in both directions; the real package against it, where there is one."""

import importlib.metadata
import inspect
from typing import Any

import pytest

from tests.support.trtllm import Fake
from tests.unit.tensorrt_llm_fake import surface
from tests.unit.tensorrt_llm_fake.surface import Row

Json = dict[str, Any]
NAMES = surface.rows()
NOT_NAMED = {  # shown by their members alone, other names of what is named, or without a signature to compare
    "GenerationExecutor", "GenerationResult", "LlmArgs", "RequestOutput", "__version__", "logger",
}  # fmt: skip


@pytest.fixture
def real() -> Any:
    try:
        importlib.metadata.distribution("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the real TensorRT-LLM is not installed: its surface was not compared with the page")
    return pytest.importorskip("tensorrt_llm")


@pytest.mark.usefixtures("trtllm")
def test_the_fake_has_what_the_page_says() -> None:
    things = {row.name: surface.found(row.name) for row in NAMES}
    shown = {name: (surface.kind(thing), surface.line(thing) or "(none)") for name, thing in things.items()}
    assert shown == {row.name: (row.kind, row.line) for row in NAMES}


@pytest.mark.usefixtures("real")
def test_the_real_package_has_what_the_page_says() -> None:
    assert {row.name: found for row in NAMES if (found := _differing(row))} == {}


def test_every_public_name_of_the_fake_stands_on_the_page(trtllm: Fake) -> None:
    named = {row.name.split(".")[-1] for row in NAMES}
    for module in (trtllm.module, *map(trtllm.submodule, ("llmapi", "executor", "_torch.auto_deploy"))):
        assert set(module.__all__) <= named | NOT_NAMED


@pytest.mark.usefixtures("trtllm")
def test_every_source_of_a_name_is_a_row_of_the_page() -> None:
    sources = {letter for letter, *_ in surface.table("Version")}
    assert {letter for row in NAMES for letter in row.source.split(", ")} <= sources


def test_what_a_row_says_is_compared_member_by_member(trtllm: Fake) -> None:
    assert [_differing(row) for row in NAMES] == [{}] * len(NAMES)
    spoilt = Row("llmapi.CudaGraphConfig", "model", "enable_padding=True, another=1", "A")
    assert _differing(spoilt) == {"enable_padding": ("True", "False"), "another": ("1", "absent")}
    assert trtllm.module


async def test_events_have_the_keys_of_the_page_in_their_order(trtllm: Fake) -> None:
    seen = _maps(await _many_events(trtllm))
    for kind, keys, _ in surface.table("Event shapes"):
        listed = keys.split(", ")
        allowed = [key.rstrip("?") for key in listed]
        assert kind in seen
        for each in seen[kind]:
            assert [key for key in allowed if key in each] == list(each) or kind in {"stored_block", "unique_token"}
            assert set(each) <= set(allowed)
            assert {key for key in listed if not key.endswith("?")} <= set(each)


async def test_statistics_have_the_keys_of_the_page(trtllm: Fake) -> None:
    llm = engine(trtllm, speculative_config=trtllm.submodule("llmapi.llm_args").MTPDecodingConfig(max_draft_len=2))
    await finished(llm, trtllm, [5] * 9)
    row = llm.get_stats(timeout=5)[0]
    seen = {"row": row, "capacity": llm.get_kv_cache_capacity()} | {
        key: each for key, each in row.items() if isinstance(each, dict)
    }
    assert {name: set(keys.split(", ")) for name, keys, _ in surface.table("Statistics keys")} == {
        name: set(each) for name, each in seen.items()
    }


def test_the_polling_methods_wait_two_seconds_where_nothing_is_said(trtllm: Fake) -> None:
    for name in ("get_stats", "get_kv_cache_events"):
        assert inspect.signature(getattr(trtllm.module.LLM, name)).parameters["timeout"].default == 2


def _differing(row: Row) -> dict[str, tuple[str, str]]:
    """Return the members whose default is another, or that are absent, with ours and theirs."""
    try:
        theirs = surface.members(surface.found(row.name))
    except (AttributeError, ModuleNotFoundError):
        return {row.name: ("present", "absent")}
    ours = dict(each.partition("=")[::2] for each in ([] if row.line == "(none)" else surface.parts(row.line)))
    return {
        name: (default, theirs.get(name, "absent")) for name, default in ours.items() if theirs.get(name) != default
    }


def engine(fake: Fake, *, cache: Json | None = None, **arguments: Any) -> Any:
    """Return an engine of the fake with 4-token blocks, events and statistics."""
    config = fake.llmapi.KvCacheConfig(**{"tokens_per_block": 4, "event_buffer_max_size": 10_000} | (cache or {}))
    return fake.module.LLM("none", kv_cache_config=config, enable_iter_perf_stats=True, **arguments)


async def finished(llm: Any, fake: Fake, prompt: Any) -> None:
    """Compute a request to its end."""
    await llm.generate_async(prompt, fake.module.SamplingParams(max_tokens=3, end_id=2))


async def _many_events(fake: Fake) -> list[Json]:
    fake.control.model = type(fake.control.model)(gpu_blocks=6, bytes_per_block=1)
    v1 = engine(fake)
    for first in range(4):
        await finished(v1, fake, [first] * 13)
    v2 = engine(fake, cache={"use_kv_cache_manager_v2": True, "kv_cache_event_hash_algo": "v2_sha256_64"})
    await finished(
        v2, fake, {"prompt": "<image>", "multi_modal_data": {"image": ["a"]}, "multi_modal_uuids": {"image": ["u"]}}
    )
    fake.control.gpus = 2
    ranks = engine(fake, tensor_parallel_size=2, enable_attention_dp=True)
    return [event for llm in (v1, v2, ranks) for event in llm.get_kv_cache_events(timeout=0)]


def _maps(told: list[Json]) -> dict[str, list[Json]]:
    seen: dict[str, list[Json]] = {"envelope": told}
    stack: list[Any] = [event["data"] for event in told]
    while stack:
        each = stack.pop()
        if isinstance(each, dict):
            seen.setdefault(each["type"], []).append(each)
            stack.extend(each.values())
        elif isinstance(each, list):
            stack.extend(each)
    return seen
