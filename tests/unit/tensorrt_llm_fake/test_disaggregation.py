"""Context, generation and encode workers, in one process and in two."""

from typing import Any

import msgspec
import pytest

from tests.support.trtllm import Fake
from tests.unit.tensorrt_llm_fake.told import engine, finished, is_healthy

PROMPT = list(range(1, 12))


def worker(fake: Fake, **arguments: Any) -> Any:
    return engine(fake, cache_transceiver_config=fake.llmapi.CacheTransceiverConfig(backend="UCX"), **arguments)


def context(llm: Any, fake: Fake, prompt: Any = PROMPT, **params: Any) -> Any:
    asked = fake.module.DisaggregatedParams(request_type="context_only")
    sampling = fake.module.SamplingParams(**({"max_tokens": 50} | params))
    return llm.generate_async(prompt, sampling, disaggregated_params=asked).result(timeout=30)


def generation(llm: Any, fake: Fake, handed: Any, prompt: Any = PROMPT, **params: Any) -> Any:
    fields = {name: getattr(handed, name) for name in ("first_gen_tokens", "first_gen_log_probs", "ctx_request_id")}
    own = fake.module.DisaggregatedParams(
        request_type="generation_only", opaque_state=bytes(handed.opaque_state), **fields
    )
    sampling = fake.module.SamplingParams(**({"max_tokens": 5} | params))
    return llm.generate_async(prompt, sampling, disaggregated_params=own, streaming=True)


def test_a_context_worker_makes_one_token_and_says_where_its_blocks_are(trtllm: Fake) -> None:
    params = trtllm.module.SamplingParams(max_tokens=50)
    asked = trtllm.module.DisaggregatedParams(request_type="CONTEXT_ONLY", disagg_request_id=77)
    llm = worker(trtllm)
    result = llm.generate_async(PROMPT, params, disaggregated_params=asked).result(timeout=30)
    output = result.outputs[0]
    handed = output.disaggregated_params
    assert params.max_tokens == 1
    assert (output.finish_reason, output.token_ids) == ("not_finished", handed.first_gen_tokens)
    assert (handed.request_type, handed.ctx_request_id, handed.disagg_request_id) == ("context_only", 77, 77)
    assert result.disaggregated_params is handed
    with pytest.raises(UnicodeDecodeError):
        handed.opaque_state.decode()


def test_both_workers_together_say_what_one_would_have_said(trtllm: Fake) -> None:
    first, second = worker(trtllm), worker(trtllm)
    handed = context(first, trtllm, logprobs=2).outputs[0].disaggregated_params
    result = generation(second, trtllm, handed, logprobs=2).result(timeout=30)
    alone = finished(engine(trtllm), trtllm, PROMPT, 5)
    assert result.outputs[0].token_ids == alone.outputs[0].token_ids
    assert [set(each) >= {token} for token, each in zip(result.outputs[0].token_ids, result.outputs[0].logprobs)]  # noqa: B905
    assert len(result.outputs[0].logprobs) == 5


def test_a_context_workers_blocks_wait_for_their_transfer(trtllm: Fake) -> None:
    first, second = worker(trtllm), worker(trtllm)
    handed = context(first, trtllm).outputs[0].disaggregated_params
    waiting = first.get_stats(timeout=5)[-1]
    assert (waiting["numActiveRequests"], waiting["kvCacheStats"]["usedNumBlocks"]) == (1, 3)
    generation(second, trtllm, handed).result(timeout=30)
    done = first.get_stats(timeout=30)[-1]
    assert (done["numActiveRequests"], done["kvCacheStats"]["usedNumBlocks"]) == (0, 0)


def test_transfers_can_be_completed_without_a_generation_worker(trtllm: Fake) -> None:
    llm = worker(trtllm)
    context(llm, trtllm)
    llm.get_stats(timeout=5)
    trtllm.control.complete_transfers()
    assert llm.get_stats(timeout=30)[-1]["kvCacheStats"]["usedNumBlocks"] == 0


def test_an_end_token_in_the_context_worker_ends_the_request_there(trtllm: Fake) -> None:
    trtllm.control.model = type(trtllm.control.model)(eos_after_tokens=0)
    output = context(llm := worker(trtllm), trtllm).outputs[0]
    assert output.finish_reason == "stop"
    assert llm.get_stats(timeout=5)[-1]["numActiveRequests"] == 0


def test_disaggregation_without_a_transceiver_fails_while_iterating(trtllm: Fake) -> None:
    with pytest.raises(trtllm.llmapi.RequestError, match="cache_transceiver_config"):
        context(llm := engine(trtllm), trtllm)
    assert is_healthy(llm)


@pytest.mark.parametrize("spoilt", ["prompt", "state", "tokens"])
def test_a_generation_worker_refuses_what_is_not_of_its_prompt(trtllm: Fake, spoilt: str) -> None:
    first, second = worker(trtllm), worker(trtllm)
    handed = context(first, trtllm).outputs[0].disaggregated_params
    if spoilt == "state":
        handed.opaque_state = b"garbage"
    if spoilt == "tokens":
        handed.first_gen_tokens = None
    with pytest.raises(trtllm.llmapi.RequestError, match=r"opaque state|first_gen_tokens"):
        generation(second, trtllm, handed, PROMPT[::-1] if spoilt == "prompt" else PROMPT).result(timeout=30)


def test_an_unknown_request_type_is_a_value_error(trtllm: Fake) -> None:
    with pytest.raises(ValueError, match="Unknown request type"):
        trtllm.module.DisaggregatedParams(request_type="prefill")


def test_an_encoder_gives_a_handle_and_eight_ints_for_each_item(trtllm: Fake) -> None:
    encoder = trtllm.module.MultimodalEncoder("none", max_batch_size=2)
    prompt = {"prompt": "<image> and <image>", "multi_modal_data": {"image": ["a", "b"]}}
    handed = encoder.generate(prompt).disaggregated_params
    assert len(handed.multimodal_embedding_handles) == 2
    assert [len(words) for words in handed.multimodal_hashes] == [8, 8]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(handed.multimodal_embedding_handles))
    assert encoder.args.max_num_tokens == 16_384


def test_a_context_worker_takes_an_encoders_handles_for_the_media(trtllm: Fake) -> None:
    encoder, llm = trtllm.module.MultimodalEncoder("none"), worker(trtllm)
    media = {"multi_modal_data": {"image": ["a"]}}
    handed = encoder.generate({"prompt": "<image>?"} | media).disaggregated_params
    handed.request_type = "context_only"
    taken = llm.generate_async({"prompt": "<image>?"}, disaggregated_params=handed).result(timeout=30)
    whole = finished(engine(trtllm), trtllm, {"prompt": "<image>?"} | media)
    assert taken.prompt_token_ids == whole.prompt_token_ids


def test_an_encoder_refuses_encode_only(trtllm: Fake) -> None:
    with pytest.raises(ValueError, match="encode_only"):
        trtllm.module.MultimodalEncoder("none", encode_only=True)


def test_the_first_candidate_refuses_a_context_while_overlap_is_on(trtllm: Fake) -> None:
    trtllm.control.version = "1.3.0rc0"
    with pytest.raises(trtllm.submodule("executor").RequestError, match="when overlap is enabled"):
        context(worker(trtllm), trtllm)
    assert context(worker(trtllm, disable_overlap_scheduler=True), trtllm).outputs[0].disaggregated_params is not None


@pytest.mark.parametrize(
    "other", [{"cache": {"dtype": "fp8"}}, {"cache": {"tokens_per_block": 8}}, {"backend": "NIXL"}], ids=str
)
def test_blocks_of_another_layout_are_refused_where_they_arrive(trtllm: Fake, other: dict[str, Any]) -> None:
    transceiver = trtllm.llmapi.CacheTransceiverConfig(backend=other.get("backend", "UCX"))
    first = worker(trtllm)
    second = engine(trtllm, cache=other.get("cache"), cache_transceiver_config=transceiver)
    handed = context(first, trtllm).outputs[0].disaggregated_params
    with pytest.raises(trtllm.submodule("executor").RequestError, match="another data type, block size"):
        generation(second, trtllm, handed).result(timeout=30)
