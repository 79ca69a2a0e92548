"""What an engine is asked for a client's request, and what is refused before it is asked."""

import contextlib
from typing import Any

import msgspec
import pytest

from kv_protocol.fleet import Role
from kv_protocol.openai.option_table import Unsupported
from kv_protocol.openai.requests import (
    MARKS,
    ChatRequest,
    CompletionRequest,
    Request,
    RequestInvalid,
    decode_chat,
    decode_completion,
)
from kv_runtime.text.byte_model import ByteText
from tests.support.engine_description import described
from worker_agent.api.request_rules import (
    RequestRules,
    bad_token_ids_of,
    logit_bias_of,
)
from worker_agent.port.handoff import Handoff
from worker_agent.port.sampling import Guide, Sampling
from worker_agent.port.types import EngineRequest

ENGINE = described(max_seq_len=100, dp_ranks=(0, 2))


def chat(**fields: Any) -> ChatRequest:
    return decode_chat(msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}))


def completion(**fields: Any) -> CompletionRequest:
    return decode_completion(msgspec.json.encode({"model": "m", "prompt": "hi", **fields}))


def rules(*, role: Role = "aggregated", loras: tuple[str, ...] = (), **description: Any) -> RequestRules:
    engine = msgspec.structs.replace(ENGINE, **description)
    return RequestRules(engine, ByteText(), default_max_tokens=16, role=role, loras=loras)


def asked(request: Request, prompt_tokens: int = 10, of: RequestRules | None = None, **fields: Any) -> EngineRequest:
    of = of or rules()
    wished = msgspec.structs.replace(of.wishes(request), prompt=(7,) * prompt_tokens)
    return of.engine_request(request, wished, **{"request_id": "r"} | fields)


def test_token_ids_from_the_router_are_base64() -> None:
    assert completion(kv_prompt_ids="AQAAAAIAAAA=").kv_prompt_ids == b"\1\0\0\0\2\0\0\0"
    for encoded in ("AQAAA", "\u2028AQAAAA==", "é" + "A" * 1_000_000):
        with pytest.raises(RequestInvalid, match=r"^kv_prompt_ids: found .*, allowed base64$") as refused:
            completion(kv_prompt_ids=encoded)
        assert len(str(refused.value)) < 200


def test_of_an_option_that_no_engine_has_only_the_value_without_effect_is_accepted() -> None:
    neutral = {name: mark.neutral for name, marks in MARKS.items() for mark in marks if isinstance(mark, Unsupported)}
    for name, harmless in neutral.items():
        asked, refusals = completion if name in ("echo", "suffix") else chat, 0
        rules().wishes(asked(**{name: harmless}))
        for value in (True, False, 7, 0.5, "end", "low", [1], ["audio"]):
            with contextlib.suppress(RequestInvalid):  # not of the option's type
                request = asked(**{name: value})
                if value != harmless:
                    refusals += 1
                    assert refused_field(request) == name, value
        assert refusals, name


def refused_field(request: Request) -> str:
    with pytest.raises(RequestInvalid) as refused:
        rules().wishes(request)
    return refused.value.field


def test_what_no_worker_does_is_refused_by_name() -> None:
    cases: list[tuple[Request, str]] = [
        (completion(best_of=2), "best_of"),
        (completion(n=3, best_of=2), "best_of"),
        (chat(stream=True, prompt_logprobs=1), "prompt_logprobs"),
        (chat(add_special_tokens=True), "add_special_tokens"),
        (chat(stream=True, stream_options={"continuous_usage_stats": True}), "stream_options.continuous_usage_stats"),
        (chat(disaggregated_params={"request_type": "generation_only"}), "disaggregated_params.request_type"),
    ]
    for request_, field in cases:
        assert refused_field(request_) == field, request_


# -------------------------------------------------------------------- how much
def test_a_request_is_asked_with_all_that_the_engine_reads() -> None:
    expected = EngineRequest(
        request_id="r",
        prompt=(7,) * 10,
        max_tokens=5,
        stop_token_ids=(1, *ByteText.eos_ids),
        dp_rank=2,
        cache_salt="salt",
        sampling=Sampling(passed={"temperature": 0.5}, choices=2, logprobs=3),
        queue_priority=0.25,
        logits_processors=("ban",),
        logit_bias=((9, 1.0),),
        bad_token_ids=(97,),
        text="seven",
        conversation_id="c",
    )
    request = chat(
        max_tokens=5,
        cache_salt="salt",
        stop_token_ids=[1],
        temperature=0.5,
        n=2,
        logprobs=True,
        top_logprobs=3,
        priority=0.25,
        logits_processors=["ban"],
        logit_bias={"9": 1},
        bad_words=["a"],
    )
    assert asked(request, dp_rank=2, text="seven", conversation_id="c") == expected


CALLS = Guide(kind="structural_tag", value={"type": "structural_tag"})


def test_calls_that_are_demanded_guide_the_answer_in_place_of_its_format() -> None:
    cases: list[Any] = [None, {"type": "json_object"}]
    for response_format in cases:
        request, of = chat(response_format=response_format, temperature=0.5), rules(takes_structural_tags=True)
        assert asked(request, of=of, forced=CALLS).sampling == Sampling(passed={"temperature": 0.5}, guide=CALLS), (
            response_format
        )


def test_nothing_is_forced_in_an_answer_that_goes_on_or_by_an_engine_without_structural_tags() -> None:
    of = rules(takes_structural_tags=True)
    assert asked(chat(), of=of, forced=CALLS, before=(1,)).sampling.guide is None
    assert asked(chat(), forced=CALLS).sampling.guide is None


def test_demanded_calls_beside_a_guide_of_the_whole_answer_are_refused() -> None:
    request = chat(guided_regex="a+")
    with pytest.raises(RequestInvalid, match="tool_choice: found it beside guided_regex, allowed one guide a request"):
        asked(request, of=rules(takes_structural_tags=True), forced=CALLS)


def test_a_priority_beyond_the_engine_s_is_the_router_s_alone() -> None:
    cases: list[tuple[Any, float | None]] = [(None, None), (0, 0.0), (1.0, 1.0), (-1, None), (7, None)]
    for priority, expected in cases:
        assert asked(chat(priority=priority)).queue_priority == expected, priority


def test_a_model_that_is_a_lora_s_name_asks_for_it() -> None:
    with_lora = rules(loras=("law",))
    assert asked(msgspec.structs.replace(chat(), model="law"), of=with_lora).lora_name == "law"
    assert asked(chat(), of=with_lora).lora_name is None


def test_a_prefill_worker_makes_one_token_whatever_was_asked() -> None:
    assert asked(chat(max_tokens=5000), of=rules(role="prefill")).max_tokens == 1


def test_what_a_prefill_worker_said_reaches_the_engine_unless_the_prompt_brings_another() -> None:
    params = msgspec.Raw(b'{"request_type":"generation_only","first_gen_tokens":[4],"encoded_opaque_state":"/w=="}')
    expected = Handoff(request_type="generation_only", first_gen_tokens=(4,), opaque_state=b"\xff")
    request, decode = chat(disaggregated_params=params), rules(role="decode")
    assert asked(request, of=decode).handoff == expected
    assert asked(request, of=decode, handoff=Handoff()).handoff == Handoff()


def test_an_empty_salt_is_none() -> None:
    assert asked(chat(cache_salt="")).cache_salt is None


def test_the_most_tokens_are_the_client_s_or_the_default_as_far_as_there_is_room() -> None:
    cases: list[tuple[Request, int, int]] = [
        (chat(), 10, 16),
        (chat(), 84, 16),
        (chat(), 85, 15),
        (chat(), 99, 1),
        (chat(max_tokens=3), 10, 3),
        (chat(max_completion_tokens=4), 10, 4),
        (chat(max_tokens=3, max_completion_tokens=4), 10, 4),
        (chat(max_tokens=90), 10, 90),
        (completion(max_tokens=5), 10, 5),
    ]
    for request_, prompt_tokens, max_tokens in cases:
        assert asked(request_, prompt_tokens).max_tokens == max_tokens, request_


def test_more_tokens_than_there_is_room_for_are_refused_with_the_numbers() -> None:
    with pytest.raises(RequestInvalid, match=r"max_tokens: found 91, allowed 1\.\.90 after a prompt of 10 tokens"):
        asked(chat(max_tokens=91))


LONG = rules(max_seq_len=1 << 20)
MANY = {"n": 64, "max_tokens": 195}  # times 21: 64 less than the bound, 262,144


def test_more_log_probabilities_than_an_unstreamed_answer_may_have_are_refused_with_the_numbers() -> None:
    cases: list[tuple[Request, Request, int, str, str]] = [
        (
            chat(logprobs=True, top_logprobs=20, **MANY),
            chat(logprobs=True, top_logprobs=20, n=64, max_completion_tokens=196),
            10,
            "top_logprobs",
            "n 64 x max_tokens 196 x (1 + top_logprobs 20) = 263424",
        ),
        (
            completion(logprobs=20, **MANY),
            completion(logprobs=20, n=65, max_tokens=195),
            10,
            "logprobs",
            "n 65 x max_tokens 195 x (1 + logprobs 20) = 266175",
        ),
        (
            completion(prompt_logprobs=3),
            completion(prompt_logprobs=4),
            1 << 16,
            "prompt_logprobs",
            "n 1 x prompt tokens 65536 x (1 + prompt_logprobs 4) = 327680",
        ),
    ]
    for fits, is_too_large, prompt_tokens, field, found in cases:
        assert asked(fits, prompt_tokens, LONG).sampling.choices == (fits.n or 1), fits
        with pytest.raises(RequestInvalid) as refused:
            asked(is_too_large, prompt_tokens, LONG)
        assert refused.value.field == field, fits
        assert (
            str(refused.value)
            == f"{field}: found {found}, allowed at most 262144 log probabilities in an answer that is not streamed"
        ), fits


def test_a_stream_may_have_any_number_of_log_probabilities() -> None:
    assert asked(chat(logprobs=True, top_logprobs=20, n=128, max_tokens=4096, stream=True), 10, LONG).max_tokens == 4096


@pytest.mark.parametrize(("request_", "field"), [(chat(), "messages"), (completion(), "prompt")])
@pytest.mark.parametrize(("prompt_tokens", "message"), [(0, "at least one token"), (100, "at most 99 tokens")])
def test_a_prompt_of_no_tokens_or_too_many_is_refused(
    request_: Request, field: str, prompt_tokens: int, message: str
) -> None:
    with pytest.raises(RequestInvalid, match=f'{field}: found "{prompt_tokens} tokens", allowed {message}'):
        asked(request_, prompt_tokens)


# -------------------------------------------------------------------- tokens that a request names
TEXT = ByteText()
(END,) = TEXT.eos_ids


def test_the_client_s_stop_tokens_stop_and_the_model_s_unless_they_are_ignored() -> None:
    cases: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({}, (END,)),
        ({"stop_token_ids": [4, 3, 4]}, (4, 3, END)),
        ({"stop_token_ids": [END]}, (END,)),
        ({"ignore_eos": True}, ()),
        ({"ignore_eos": True, "stop_token_ids": [3]}, (3,)),
    ]
    for fields, tokens in cases:
        assert asked(completion(**fields)).stop_token_ids == tokens, fields


def test_a_bad_word_is_its_token() -> None:
    assert bad_token_ids_of(completion(), TEXT) == ()
    assert bad_token_ids_of(completion(bad_words=["a", " ", "a"]), TEXT) == (97, 32)


def test_what_names_no_token_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"logit_bias": {"9999999999": 1}}, r"logit_bias: found \"9999999999\", allowed tokens 0\.\.262"),
        ({"logit_bias": {"263": 1}}, 'logit_bias: found "263"'),
        ({"bad_words": ["a", "ab"]}, r"bad_words\[1\]: found \"ab\", allowed a word of one token: it has 2"),
    ]
    for fields, message in cases:
        asked = completion(**fields)
        with pytest.raises(RequestInvalid, match=message) as refused:
            (logit_bias_of(asked, TEXT), bad_token_ids_of(asked, TEXT))
        assert len(str(refused.value)) < 300, fields
