"""What a client's request says of sampling."""

from typing import Any

import pytest

from kv_protocol.openai.requests import RequestInvalid
from tests.unit.worker_agent.test_request_rules import chat, completion
from worker_agent.api.request_sampling import sampling_of
from worker_agent.port.sampling import Guide, Sampling

TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}


def test_a_request_that_wishes_nothing_has_no_wishes() -> None:
    assert sampling_of(chat()) == sampling_of(completion()) == Sampling()


def test_wishes_keep_their_values() -> None:
    wishes = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": 1, "min_tokens": 2}
    wishes |= {"frequency_penalty": 1.0, "presence_penalty": -1.0, "repetition_penalty": 1.5, "ignore_eos": True}
    assert sampling_of(completion(n=2, prompt_logprobs=3, **wishes)) == Sampling(
        choices=2,
        prompt_logprobs=3,
        **wishes,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("request_", "count"),
    [
        (chat(logprobs=True), 0),
        (chat(logprobs=True, top_logprobs=5), 5),
        (chat(logprobs=False), None),
        (completion(logprobs=0), 0),
        (completion(logprobs=4), 4),
        (completion(), None),
    ],
)
def test_log_probabilities_by_either_interface(request_: Any, count: int | None) -> None:
    assert sampling_of(request_).logprobs == count


@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        ({"guided_json": {"type": "object"}}, Guide(kind="json", value={"type": "object"})),
        ({"guided_regex": "a+"}, Guide(kind="regex", value="a+")),
        ({"guided_choice": ["a.", "b"]}, Guide(kind="regex", value="(a\\.|b)")),
        ({"guided_grammar": "g"}, Guide(kind="grammar", value="g")),
        ({"structural_tag": {"t": 1}}, Guide(kind="structural_tag", value={"t": 1})),
        ({"structured_outputs": {"choice": ["a"]}}, Guide(kind="regex", value="(a)")),
        ({"structured_outputs": {"json": {}}}, Guide(kind="json", value={})),
        ({"structured_outputs": {"json_object": True}}, Guide(kind="json_object")),
        ({"response_format": {"type": "json_object"}}, Guide(kind="json_object")),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, Guide(kind="json", value={})),
        ({"response_format": {"type": "json", "schema": {}}}, Guide(kind="json", value={})),
        ({"response_format": {"type": "regex", "regex": "a"}}, Guide(kind="regex", value="a")),
        ({"response_format": {"type": "ebnf", "ebnf": "g"}}, Guide(kind="grammar", value="g")),
        ({"response_format": TAG}, Guide(kind="structural_tag", value=TAG)),
        ({"structured_outputs": {"json": "{}"}}, Guide(kind="json", value="{}")),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_json": None}, None),
    ],
)
def test_every_way_to_ask_for_a_guide(fields: dict[str, Any], guide: Guide | None) -> None:
    assert sampling_of(chat(**fields)).guide == guide


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ],
)
def test_what_the_worker_cannot_do_is_refused_with_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestInvalid) as error:
        sampling_of(chat(**fields))
    assert error.value.field == field
