"""The cache and what it tells: a reader of the events holds what the cache holds."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.amount import examples
from tests.support.trtllm import Fake
from tests.unit.tensorrt_llm_fake.told import Json, caches, engine, events, finished, held

IDS = list(range(1, 10))


def test_a_prompt_is_stored_after_its_prefill_and_the_rest_at_the_end_with_a_partial_block(trtllm: Fake) -> None:
    llm = engine(trtllm)
    output = finished(llm, trtllm, IDS, tokens=3).outputs[0].token_ids
    prefill, end = events(llm)[1:]
    assert [_tokens(block) for block in prefill["data"]["blocks"]] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert prefill["data"]["parent_hash"] is None
    assert end["data"]["parent_hash"] == prefill["data"]["blocks"][-1]["block_hash"]
    assert [_tokens(block) for block in end["data"]["blocks"]] == [[9, *output[:2]]]


def test_salt_and_adapter_separate_prefixes(trtllm: Fake) -> None:
    llm = engine(trtllm)
    lora = trtllm.llmapi.LoRARequest("tall", 7, str(trtllm.module.__path__[0]))
    for told in ({}, {"cache_salt": "a"}, {"lora_request": lora}):
        assert finished(llm, trtllm, IDS, **told).cached_tokens == 0
        assert finished(llm, trtllm, IDS, **told).cached_tokens == 8
    stored = [each["data"] for each in events(llm) if each["data"]["type"] == "stored"]
    assert {data["blocks"][0]["cache_salt"] for data in stored} == {None, "a"}
    assert len({data["blocks"][0]["block_hash"] for data in stored}) >= 3


def test_attention_ranks_have_caches_and_ids_of_their_own(trtllm: Fake) -> None:
    llm = engine(trtllm, tensor_parallel_size=2, enable_attention_dp=True)
    scheduling = trtllm.submodule("scheduling_params").SchedulingParams
    for rank in (0, 1, 1):
        on = scheduling(attention_dp_rank=rank, attention_dp_relax=False)
        result = finished(llm, trtllm, IDS, scheduling_params=on)
    assert result.cached_tokens == 8
    told = events(llm)
    assert [[each["event_id"] for each in told if each["attention_dp_rank"] == rank] for rank in (0, 1)] == [
        [0, 1, 2],
        [0, 1, 2],
    ]
    assert {row["attentionDpRank"] for row in llm.get_stats(timeout=5)} == {0, 1}
    absent = llm.generate_async(IDS, scheduling_params=scheduling(attention_dp_rank=2))
    with pytest.raises(trtllm.llmapi.RequestError, match="attention_dp_rank"):
        absent.result(timeout=30)


@pytest.mark.parametrize(("algorithm", "kind"), [("v2_sha256", str), ("v2_sha256_64", int), ("auto", int)])
def test_manager_v2_names_its_algorithm_and_its_group(trtllm: Fake, algorithm: str, kind: type) -> None:
    llm = engine(trtllm, cache={"use_kv_cache_manager_v2": True, "kv_cache_event_hash_algo": algorithm})
    finished(llm, trtllm, IDS)
    stored = events(llm)[1]
    assert (stored["layer_group_id"], stored["hash_algo"]) == (0, algorithm.replace("auto", "v1_block_key"))
    assert isinstance(stored["data"]["blocks"][0]["block_hash"], kind)


def test_media_are_keys_of_the_blocks_they_lie_in(trtllm: Fake) -> None:
    llm = engine(trtllm)
    prompt = {"prompt": "<image>?", "multi_modal_data": {"image": [b"a cat"]}}
    result = finished(llm, trtllm, prompt)
    assert result.prompt_token_ids[1:9] == [trtllm.control.model.vocab_size] * 8
    blocks = events(llm)[1]["data"]["blocks"]
    assert [[key["start_offset"] for key in block["mm_keys"]] for block in blocks] == [[0], [3]]
    assert {len(key["hash"]) for block in blocks for key in block["mm_keys"]} == {64}
    assert finished(llm, trtllm, prompt).cached_tokens == 8
    assert finished(llm, trtllm, prompt | {"multi_modal_data": {"image": [b"a dog"]}}).cached_tokens == 0


def test_a_uuid_stands_for_the_digest(trtllm: Fake) -> None:
    llm = engine(trtllm)
    given = {"multi_modal_data": {"image": [b"a cat"]}, "multi_modal_uuids": {"image": ["cat-1"]}}
    finished(llm, trtllm, {"prompt": "<image>?"} | given)
    keys = [key for block in events(llm)[1]["data"]["blocks"] for key in block["mm_keys"]]
    assert {key["hash"] for key in keys} == {"cat-1"}


def test_a_reader_that_missed_an_event_does_not_hold_what_the_cache_holds(trtllm: Fake) -> None:
    llm = engine(trtllm)
    finished(llm, trtllm, IDS, 1)
    created, _, *others = events(llm)
    assert held([created, *others]) != caches(llm)[0].hashes()


@settings(max_examples=examples(25, least=8), suppress_health_check=list(HealthCheck))
@given(
    prompts=st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=14), min_size=1, max_size=12),
    blocks=st.integers(5, 12),
    windows=st.sampled_from([None, [8, 64]]),
)
def test_a_reader_of_the_events_holds_what_the_cache_holds(
    trtllm: Fake, prompts: list[list[int]], blocks: int, windows: Any
) -> None:
    trtllm.control.model = type(trtllm.control.model)(gpu_blocks=blocks, bytes_per_block=1)
    llm = engine(trtllm, cache={"max_attention_window": windows}, max_seq_len=64)
    for prompt in prompts:
        finished(llm, trtllm, prompt, 4)
    told = events(llm)
    for cache in caches(llm):
        assert held(told, cache.window) == cache.hashes()
        assert cache.used == 0
        assert len(cache.hashes()) <= blocks


def _tokens(block: Json) -> list[int]:
    return [each["token_id"] for each in block["tokens"]]
