"""A completion's prompts: a text, its ids, or a list of either."""

import json
from typing import Any

import msgspec
import pytest

from kv_protocol.hashing import pack_tokens
from kv_protocol.openai.errors import RequestInvalid
from kv_protocol.openai.parts import PROMPTS_MAX, read_ids, read_prompts

MANY = list(range(90_000))


def raw(value: Any, **layout: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value, **layout).encode())


@pytest.mark.parametrize("prompt", ["a", ["a"]])
def test_a_text_alone_or_in_a_list_is_that_text(prompt: Any) -> None:
    assert read_prompts(raw(prompt)) == ["a"]


def test_several_prompts_keep_their_order() -> None:
    assert read_prompts(raw(["a", "b"])) == ["a", "b"]
    assert read_prompts(raw([[1], MANY, [3]])) == [pack_tokens(each) for each in ([1], MANY, [3])]


@pytest.mark.parametrize("ids", [[1, 2], MANY])
@pytest.mark.parametrize("layout", [{}, {"indent": 2}, {"separators": (",", ":")}])
def test_ids_alone_or_in_a_list_are_those_ids(ids: list[int], layout: Any) -> None:
    assert read_prompts(raw(ids, **layout)) == read_prompts(raw([ids], **layout)) == [pack_tokens(ids)]


@pytest.mark.parametrize(
    ("prompt", "field", "found"),
    [
        (["a", ""], "prompt[1]", 'found ""'),
        (["a"] * (PROMPTS_MAX + 1), "prompt", f"found {PROMPTS_MAX + 1} prompts, allowed at most {PROMPTS_MAX}"),
        ([], "prompt", "found []"),
        ([""], "prompt[0]", 'found ""'),
        ([[]], "prompt[0]", "found []"),
        ([["a"]], "prompt[0][0]", 'found "a"'),
        ([[[1]]], "prompt[0][0]", "found [1]"),
        ([1, "a"], "prompt[1]", 'found "a"'),
        ([1, None], "prompt[1]", "found null"),
        ([True], "prompt[0]", "found true"),
        ({"a": 1}, "prompt", 'found {"a": 1}'),
        (7, "prompt", "found 7"),
        ([*MANY, -1], "prompt[90000]", "found -1"),
        ([*MANY, "a", *MANY], "prompt[90000]", 'found "a"'),
        ([*MANY, [1, 2], *MANY], "prompt[90000]", "found [1, 2]"),
    ],
)
def test_what_is_no_prompt_is_named_by_its_place(prompt: Any, field: str, found: str) -> None:
    with pytest.raises(RequestInvalid) as refused:
        read_prompts(raw(prompt))
    assert refused.value.field == field
    assert found in str(refused.value)


@pytest.mark.parametrize("ids", ["x" * 200_000, {"a": "x" * 200_000}, [[1, 2] * 50_000], 7, [], [1.5], None])
def test_what_is_no_list_of_ids_is_refused(ids: Any) -> None:
    with pytest.raises(RequestInvalid, match=r"^nvext\.token_data"):
        read_ids(raw(ids), "nvext.token_data")
