"""What a client's request says of sampling, and which part of a generation it asks for, by role."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from kv_protocol.openai.option_table import PASSED
from kv_protocol.openai.requests import MARKS, RequestInvalid
from tests.unit.worker_agent.test_request_rules import chat, completion
from worker_agent.api.request_rules import NOTHING_ASKED, phase_of, sampling_of
from worker_agent.port.handoff import Handoff
from worker_agent.port.sampling import Guide, Sampling

PASSED_ON = {name: 1 for name, marks in MARKS.items() if PASSED in marks}
"""The options that the engine gets under their names, each with a value that it may have."""
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}


def test_a_request_that_wishes_nothing_has_no_wishes() -> None:
    assert sampling_of(chat()) == sampling_of(completion()) == Sampling()


def test_an_option_that_is_passed_on_keeps_its_name_and_value() -> None:
    assert PASSED_ON == sampling_of(completion(**PASSED_ON)).passed == sampling_of(chat(**PASSED_ON)).passed
    assert sampling_of(completion(n=2, prompt_logprobs=3, ignore_eos=True)) == Sampling(
        choices=2, prompt_logprobs=3, ignore_eos=True
    )


def test_log_probabilities_by_either_interface() -> None:
    cases: list[tuple[Any, int | None]] = [
        (chat(logprobs=True), 0),
        (chat(logprobs=True, top_logprobs=5), 5),
        (chat(logprobs=False), None),
        (completion(logprobs=0), 0),
        (completion(logprobs=4), 4),
        (completion(), None),
    ]
    for request_, count in cases:
        assert sampling_of(request_).logprobs == count, request_


def test_every_way_to_ask_for_a_guide() -> None:
    cases: list[tuple[dict[str, Any], Guide | None]] = [
        ({"guided_json": {"type": "object"}}, Guide(kind="json", value={"type": "object"})),
        ({"guided_regex": "a+"}, Guide(kind="regex", value="a+")),
        ({"guided_choice": ["a.", "b"]}, Guide(kind="regex", value="(a\\.|b)")),
        ({"guided_grammar": "g"}, Guide(kind="grammar", value="g")),
        ({"structural_tag": {"t": 1}}, Guide(kind="structural_tag", value='{"t":1}')),
        ({"structured_outputs": {"choice": ["a"]}}, Guide(kind="regex", value="(a)")),
        ({"structured_outputs": {"json": {}}}, Guide(kind="json", value={})),
        ({"structured_outputs": {"json_object": True}}, Guide(kind="json_object")),
        ({"response_format": {"type": "json_object"}}, Guide(kind="json_object")),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, Guide(kind="json", value={})),
        ({"response_format": {"type": "json", "schema": {}}}, Guide(kind="json", value={})),
        ({"response_format": {"type": "regex", "regex": "a"}}, Guide(kind="regex", value="a")),
        ({"response_format": {"type": "ebnf", "ebnf": "g"}}, Guide(kind="grammar", value="g")),
        ({"response_format": TAG}, Guide(kind="structural_tag", value=json.dumps(TAG, separators=(",", ":")))),
        ({"structured_outputs": {"json": "{}"}}, Guide(kind="json", value="{}")),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_json": None}, None),
    ]
    for fields, guide in cases:
        found = sampling_of(chat(**fields)).guide
        assert (found and replace(found, field="")) == guide, fields
        assert found is None or found.field.partition(".")[0] in fields


def test_what_the_worker_cannot_do_is_refused_with_its_field() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "ebnf"}}, "response_format.ebnf"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "text", "regex": "a"}}, "response_format.regex"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format"),
        ({"response_format": {"type": "regex", "regex": "a"}, "guided_json": {}}, "response_format"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ]
    for fields, field in cases:
        with pytest.raises(RequestInvalid) as error:
            sampling_of(chat(**fields))
        assert error.value.field == field, fields


# -------------------------------------------------------------------- phases
STATE = {"first_gen_tokens": [4], "encoded_opaque_state": "/w=="}
HANDOFF = Handoff(first_gen_tokens=(4,), opaque_state=b"\xff")
MEDIA = {"multimodal_embedding_handles": [{"a": 1}]}


def test_a_request_asks_for_what_the_role_does_or_for_the_part_that_it_names() -> None:
    cases: list[tuple[Any, dict[str, Any] | None, dict[str, Any]]] = [
        ("aggregated", None, {}),
        ("prefill", None, {}),
        ("decode", None, {}),
        *(
            ("decode", {"request_type": kind, **STATE}, {"handoff": replace(HANDOFF, request_type=kind)})
            for kind in ("context_only", "generation_only")
        ),
        ("decode", {"request_type": "context_and_generation"}, {"is_context_and_generation": True}),
        ("aggregated", {"request_type": "context_and_generation"}, {}),
        ("prefill", {"request_type": "context_only", "disagg_request_id": 7}, {"transfer_id": 7}),
        ("prefill", MEDIA, {"handoff": Handoff(multimodal_embedding_handles=({"a": 1},))}),
        ("aggregated", STATE, {"handoff": HANDOFF}),  # the engine refuses it
    ]
    for role, params, fields in cases:
        assert phase_of(chat(disaggregated_params=params), role) == replace(NOTHING_ASKED, **fields), role


def test_another_role_s_part_is_refused() -> None:
    cases: list[tuple[Any, str, str]] = [
        ("aggregated", "context_only", "context_and_generation on"),
        ("aggregated", "generation_only", "context_and_generation on"),
        ("prefill", "generation_only", "context_only on"),
        ("prefill", "context_and_generation", "context_only on"),
        ("decode", "rest", "generation_only or context_only or context_and_generation on"),
    ]
    for role, kind, allowed in cases:
        message = f'disaggregated_params.request_type: found "{kind}", allowed {allowed} a worker whose role is {role}'
        with pytest.raises(RequestInvalid, match=message):
            phase_of(chat(disaggregated_params={"request_type": kind, **STATE}), role)


def test_an_encode_worker_generates_nothing() -> None:
    cases: list[dict[str, Any] | None] = [None, MEDIA]
    for params in cases:
        with pytest.raises(RequestInvalid, match='role: found "encode", allowed aggregated, prefill or decode'):
            phase_of(chat(disaggregated_params=params), "encode")
