"""TensorRT-LLM's engine over the fake package, where its versions and its models' defaults differ."""

from typing import Any

import pytest
from msgspec.structs import replace

from kv_runtime.clock import Clock
from tests.contract.engines import outputs, request
from tests.support.trtllm import Fake
from worker_agent.engine_args.arguments import EngineOptions, effective_args, flag_layer
from worker_agent.engine_args.layers import layer
from worker_agent.engines.trtllm.engine import TensorRTLLMEngine
from worker_agent.engines.trtllm.settings import TrtllmSettings
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_events import EngineStored

TRANSCEIVER = {"cache_transceiver_config": {"backend": "NIXL", "max_tokens_in_buffer": 8192}}
QUICK = TrtllmSettings(transfer_s=0.1)


def engine(values: dict[str, Any] | None = None, **circumstances: Any) -> TensorRTLLMEngine:
    around = EngineOptions(**circumstances)
    file = layer("file", [((), {"max_seq_len": 200, **(values or {})}, "engine.yaml")])
    args = effective_args([flag_layer(around), file], around)
    return TensorRTLLMEngine(args, Clock(), model="m", settings=QUICK)


async def test_the_oldest_version_computes_contexts_on_a_prefill_worker(trtllm: Fake) -> None:
    trtllm.control.version = "1.3.0rc0"
    prefill = engine(TRANSCEIVER, role="prefill", engine_version="1.3.0rc0")
    await prefill.start()
    (handed,) = await outputs(prefill, request("a"))
    assert handed.handoff is not None
    await prefill.stop(0.0)


@pytest.mark.usefixtures("trtllm")
async def test_newer_keys_of_a_handoff_are_dropped_where_the_engine_does_not_know_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    prefill = engine(TRANSCEIVER, role="prefill")
    decode = engine(TRANSCEIVER, role="decode")
    await prefill.start()
    await decode.start()
    for name in ("a", "b"):
        (handed,) = await outputs(prefill, request(name))
        assert handed.handoff is not None
        newer = replace(handed.handoff, others={"newer": 1})
        answer = await outputs(decode, request(name, handoff=newer))
        assert answer[-1].finish_reason == "length"
    assert capfd.readouterr().out.count("handoff_keys_dropped") == 1
    await decode.stop(0.0)
    await prefill.stop(0.0)


V2 = {"use_kv_cache_manager_v2": True, "tokens_per_block": 16, "event_buffer_max_size": 1000}


async def test_1_4_polls_its_cache_manager_whose_hashes_are_hex_digits(trtllm: Fake) -> None:
    trtllm.control.version = "1.4.0rc1"
    polled = engine({"kv_cache_config": {**V2, "kv_cache_event_hash_algo": "v2_sha256"}}, engine_version="1.4.0rc1")
    await polled.start()
    await outputs(polled, request(prompt=(7,) * 32))
    rules = TrtllmRules(16)
    stored = [each.event for each in rules.translate(polled.kv_events(5.0)) if isinstance(each.event, EngineStored)]
    chain = [(each.token_ids, each.parent_block_hash) for each in stored[:2]]
    assert (chain, rules.stale(0)) == ([((7,) * 16, None), ((7,) * 16, stored[0].block_hashes[0])], "")
    await polled.stop(0.0)
