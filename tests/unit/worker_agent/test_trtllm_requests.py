"""What the engine is asked for a request, by role."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.fleet import Role
from tests.support.engine_description import described
from tests.support.trtllm import Fake, trtllm
from tests.unit.worker_agent.engine_arguments import effective
from tests.unit.worker_agent.test_request_sampling import PASSED_ON
from worker_agent.engine_args.arguments import EngineArgs
from worker_agent.engines.trtllm.bindings import Bindings
from worker_agent.engines.trtllm.requests import (
    NO_END_TOKEN,
    check_request,
    disaggregated_fields,
    sampling_fields,
)
from worker_agent.engines.trtllm.settings import TrtllmSettings
from worker_agent.media.inputs import cache_salt_of
from worker_agent.media.parts import embeddings_media
from worker_agent.media.safetensors import written_tensor
from worker_agent.port.handoff import Handoff
from worker_agent.port.sampling import Guide, Sampling, choice_pattern
from worker_agent.port.types import EngineRequest, Media, RequestRefused, takes_transfer

__all__ = ["trtllm"]
ENGINE = described(event_source="trtllm", total_kv_blocks=0, max_seq_len=100)
STATE = Handoff(opaque_state=b"\xff", first_gen_tokens=(5,), multimodal_hashes=((1, 2, 3, 4, 5, 6, 7, 8),))
MEDIA = Handoff(multimodal_embedding_handles=({"k": 1},), multimodal_hashes=((1, 2, 3, 4, 5, 6, 7, 8),))
IMAGE = Media(field="f", media_type="image/png", data=b"\x89", digest="0" * 64)
FILE = embeddings_media("f", written_tensor("F16", (2, 3), bytes(12)))
LLGUIDANCE = effective({"guided_decoding_backend": "llguidance"})
ATTENTION_DP = {"enable_attention_dp": True, "tensor_parallel_size": 2}
TOKENS = st.lists(st.integers(0, 5), max_size=4)


def asked(**fields: Any) -> EngineRequest:
    told: dict[str, Any] = {"request_id": "a", "prompt": (1, 2, 3), "max_tokens": 9, **fields}
    return EngineRequest(**told)


def fields_of(role: Role = "aggregated", end_ids: tuple[int, ...] = (2,), **fields: Any) -> dict[str, Any]:
    return sampling_fields(asked(**fields), role, end_ids)


def check(request: EngineRequest, args: EngineArgs, **settings: Any) -> None:
    check_request(request, ENGINE, args, TrtllmSettings(**settings), id_in_use=False)


def refusal(args: EngineArgs, processors: tuple[str, ...] = (), **fields: Any) -> str:
    with pytest.raises(RequestRefused) as error:
        check(asked(**fields), args, logits_processors=dict.fromkeys(processors, "m:f"))
    return str(error.value)


def test_what_was_not_wished_is_the_engine_s_own_choice() -> None:
    assert fields_of(end_ids=()) == {"max_tokens": 9, "detokenize": False, "end_id": NO_END_TOKEN, "pad_id": 0}


def test_options_that_are_passed_on_keep_their_names_and_values_and_the_engine_knows_them(trtllm: Fake) -> None:
    fields = fields_of(sampling=Sampling(passed=PASSED_ON))
    assert PASSED_ON.items() <= fields.items()
    assert trtllm.module.SamplingParams(**fields)


@pytest.mark.parametrize(("wish", "told"), [(-1, 0), (0, 0), (5, 5)])
def test_top_k_minus_one_is_all_tokens(wish: int, told: int) -> None:
    assert fields_of(sampling=Sampling(passed={"top_k": wish}))["top_k"] == told


@pytest.mark.parametrize(("wish", "told"), [(0, 1), (1, 1), (20, 20)])
def test_log_probabilities_of_the_chosen_token_alone_are_asked_as_one(wish: int, told: int) -> None:
    fields = fields_of(sampling=Sampling(logprobs=wish, prompt_logprobs=wish))
    assert (fields["logprobs"], fields["prompt_logprobs"]) == (told, told)


def test_as_many_sequences_are_computed_as_are_answered() -> None:
    fields = fields_of(sampling=Sampling(choices=3))
    assert (fields["n"], fields["best_of"]) == (3, 3)


def test_a_prefill_worker_makes_one_token_and_keeps_the_stop_conditions() -> None:
    fields = fields_of("prefill", stop_token_ids=(2, 7))
    assert (fields["max_tokens"], fields["end_id"], fields["stop_token_ids"]) == (1, 2, [7])


@given(TOKENS, TOKENS, st.booleans())
def test_exactly_the_tokens_that_should_stop_do(stops: list[int], ends: list[int], ignored: bool) -> None:
    fields = fields_of(end_ids=tuple(ends), stop_token_ids=tuple(stops), sampling=Sampling(ignore_eos=ignored))
    stopping = set() if fields.get("ignore_eos") else {fields["end_id"], *fields.get("stop_token_ids", [])}
    assert stopping - {NO_END_TOKEN} == set(stops) - (set(ends) if ignored else set())
    assert fields["end_id"] is not None
    assert ("stop_token_ids" in fields) == ("include_stop_str_in_output" in fields)


@pytest.mark.parametrize(
    ("role", "fields", "request_type"),
    [
        ("aggregated", {}, None),
        ("prefill", {}, "context_only"),
        ("prefill", {"handoff": MEDIA, "text": "<image>"}, "context_only"),
        ("aggregated", {"handoff": MEDIA, "text": "<image>"}, "context_and_generation"),
        ("decode", {"handoff": STATE}, "generation_only"),
        ("decode", {"is_context_and_generation": True}, None),
    ],
)
def test_each_role_asks_for_its_part(role: Role, fields: dict[str, Any], request_type: str | None) -> None:
    request = asked(**fields)
    check(request, effective(role=role))
    assert (disaggregated_fields(request, role) or {}).get("request_type") == request_type
    assert takes_transfer(request, role) == (request_type == "generation_only")


@pytest.mark.parametrize(
    ("role", "fields", "says"),
    [
        ("prefill", {"handoff": MEDIA}, "text: found null, allowed the prompt as text"),
        ("prefill", {"handoff": MEDIA, "text": "a", "media": (IMAGE,)}, 'media: found "1 items", allowed none beside'),
        ("decode", {"handoff": STATE, "media": (IMAGE,)}, 'media: found "1 items", allowed none: the prefill worker'),
        ("aggregated", {"logit_bias": ((3, 1.0),)}, 'logit_bias: found "some", allowed none: the size of'),
        ("decode", {"handoff": MEDIA}, "disaggregated_params.first_gen_tokens: found null"),
        ("aggregated", {"sampling": Sampling(guide=Guide(kind="json_object"))}, 'guided_decoding: found "a guide"'),
    ],
)
def test_what_the_engine_cannot_do_is_refused_with_its_field(role: Role, fields: dict[str, Any], says: str) -> None:
    assert refusal(effective(role=role), **fields).startswith(says)


def test_a_structural_tag_is_refused_where_xgrammar_does_not_guide() -> None:
    wishes: dict[str, Any] = {"sampling": Sampling(guide=Guide(kind="structural_tag", value="{}"))}
    says = 'guided_decoding: found "a structural tag", allowed another guide: llguidance has none, xgrammar has'
    assert refusal(LLGUIDANCE, **wishes) == says
    check(asked(**wishes), effective({"guided_decoding_backend": "xgrammar"}))
    other = Sampling(guide=Guide(kind="json_object"))
    check(asked(sampling=other), LLGUIDANCE)


def test_processors_see_one_sequence() -> None:
    wishes: dict[str, Any] = {"logits_processors": ("p",), "sampling": Sampling(choices=2)}
    assert refusal(effective(), ("p",), **wishes).startswith("n: found 2, allowed 1 with logits")


@given(st.lists(st.text(alphabet="ab.*+?()[]{}|^$\\ -", min_size=1), min_size=1), st.text(alphabet="ab.|\\"))
def test_a_pattern_of_choices_matches_them_and_nothing_else(choices: list[str], other: str) -> None:
    pattern = re.compile(choice_pattern(choices))
    assert all(pattern.fullmatch(choice) for choice in choices)
    assert bool(pattern.fullmatch(other)) == (other in choices)


def test_a_prompt_with_media_is_tokenized_as_it_stands() -> None:
    assert fields_of(media=(IMAGE,), text="<image>")["add_special_tokens"] is False
    assert "add_special_tokens" not in fields_of(text="unused")


def test_embeddings_have_a_salt_of_their_own_and_images_do_not() -> None:
    def salt(**fields: Any) -> str | None:
        return cache_salt_of(asked(**fields))

    assert salt(media=(IMAGE,)) is None
    assert salt(media=(IMAGE,), cache_salt="s") == "s"
    other = embeddings_media("f", written_tensor("F16", (2, 3), bytes(11) + b"1"))
    salts: list[dict[str, Any]] = [
        {"media": (FILE,)},
        {"media": (other,)},
        {"media": (FILE, other)},
        {"media": (FILE,), "cache_salt": "s"},
    ]
    assert len({salt(**fields) for fields in salts}) == len(salts)
    assert salt(media=(FILE,)) == salt(media=(FILE,))


@pytest.mark.usefixtures("trtllm")
def test_a_conversation_chooses_the_rank_where_the_engine_keeps_conversations_together() -> None:
    args, request = effective(ATTENTION_DP), asked(conversation_id="c", dp_rank=1)
    for conversations, named in ((True, "conversation_params"), (False, "scheduling_params")):
        bindings = Bindings(args, TrtllmSettings(conversation_affinity=conversations))
        bindings.llm = SimpleNamespace(generate_async=dict)
        call = bindings.call(request, [])
        assert isinstance(call, partial)
        assert call.keywords.keys() == {"streaming", named}
