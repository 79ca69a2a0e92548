"""Small engines, and what their events say is held."""

from typing import Any

from tests.support.trtllm import Fake

BLOCK = 4
Json = dict[str, Any]


def engine(fake: Fake, *, cache: Json | None = None, **arguments: Any) -> Any:
    """Return an engine of the fake with 4-token blocks, events and statistics."""
    told = {"tokens_per_block": BLOCK, "event_buffer_max_size": 10_000} | (cache or {})
    config = fake.llmapi.KvCacheConfig(**told)
    return fake.module.LLM("none", kv_cache_config=config, enable_iter_perf_stats=True, **arguments)


def finished(llm: Any, fake: Fake, prompt: Any, tokens: int = 3, **arguments: Any) -> Any:
    """Return a request's result at its end."""
    parameters = fake.module.SamplingParams(max_tokens=tokens, end_id=2)
    return llm.generate_async(prompt, parameters, **arguments).result(timeout=30)


def events(llm: Any) -> list[Json]:
    """Return all events since the last call, without waiting."""
    return list(llm.get_kv_cache_events(timeout=0))


def held(told: list[Json], window: int | None = None) -> set[Any]:
    """Return the hashes that a reader of the events holds."""
    blocks: set[Any] = set()
    for event in told:
        data = event["data"]
        if window in (None, event["window_size"]):
            new, gone = {each["block_hash"] for each in data.get("blocks", [])}, {*data.get("block_hashes", [])}
            assert not new & blocks
            assert gone <= blocks
            blocks = blocks | new - gone if new else blocks - gone
    return blocks


def caches(llm: Any, rank: int = 0) -> Any:
    """Return the caches of a rank, one for each window."""
    return executor_of(llm).engine.ranks[rank].caches


def executor_of(llm: Any) -> Any:
    """Return what drives the engine, by the library's own name."""
    return llm._executor  # noqa: SLF001 - the library has no public one


def is_healthy(llm: Any) -> bool:
    """Return the library's word on the engine's health, as the agent asks for it."""
    return bool(llm._check_health())  # noqa: SLF001 - the library has no public one
