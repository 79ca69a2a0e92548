"""Which ranks may take a request, in which order reasons count, and what a preference costs."""

from typing import Any

import pytest

from router.decision.eligibility import exclusions, reason_kind
from tests.unit.router.samples import rank, route, row, view


def reason(request: dict[str, Any], **standing: Any) -> str:
    (why,) = exclusions(view(row(**standing)), route(**request))
    return why


@pytest.mark.parametrize(
    ("request_", "standing", "expected"),
    [
        ({}, {"unfit": "draining"}, "draining"),
        ({}, {"role": "prefill"}, "role prefill: whole is asked of workers that are aggregated"),
        ({"lora": "x"}, {"loras": ("y", "z")}, "lora: found 'x', allowed y, z"),
        ({"lora": "x"}, {}, "lora: found 'x', allowed none"),
        ({"required_taints": ("a", "b")}, {"taints": ("a",)}, "taint 'b' is required, the worker has a"),
        ({"isl_tokens": 40, "max_tokens": 9}, {"max_seq_len": 48}, "max_seq_len: 40 + 9 tokens, at most 48"),
        ({"isl_tokens": 48}, {"max_seq_len": 48}, "max_seq_len: 48 + 1 tokens, at most 48"),
        ({"pinned_worker": "w1"}, {}, "pinned to w1"),
        ({"pinned_dp_rank": 3}, {}, "pinned to dp_rank 3"),
        ({"tried": (rank("w0/0"),)}, {}, "failed this request"),
        ({}, {}, ""),
        ({"lora": "x"}, {"loras": ("x",)}, ""),
        ({"required_taints": ("a", "b")}, {"taints": ("b", "a", "c")}, ""),
        ({}, {"taints": ("a",), "loras": ("x",)}, ""),
        ({"isl_tokens": 47, "max_tokens": 1}, {"max_seq_len": 48}, ""),
        ({"isl_tokens": 0, "max_tokens": 99}, {"max_seq_len": 48}, ""),
        ({"pinned_worker": "w0", "pinned_dp_rank": 0}, {}, ""),
        ({"tried": (rank("w0/1"),)}, {}, ""),
    ],
)
def test_a_reason_says_what_was_found_and_what_is_allowed_and_a_met_constraint_is_none(
    request_: dict[str, Any], standing: dict[str, Any], expected: str
) -> None:
    assert reason(request_, **standing) == expected


@pytest.mark.parametrize(
    ("role", "phase", "isl_tokens", "told"),
    [
        ("aggregated", "whole", 48, ""),
        ("aggregated", "whole", 49, "max_prompt_tokens: 49 tokens, at most 48"),
        ("prefill", "prefill", 49, "max_prompt_tokens: 49 tokens, at most 48"),
        ("decode", "alone", 49, "max_prompt_tokens: 49 tokens, at most 48"),
        ("decode", "decode", 49, ""),
        ("aggregated", "whole", 0, ""),
    ],
)
def test_a_prompt_that_the_worker_cannot_compute(role: str, phase: str, isl_tokens: int, told: str) -> None:
    standing: dict[str, Any] = {"role": role, "max_seq_len": 1000, "max_prompt_tokens": 48}
    found = reason({"phase": phase, "isl_tokens": isl_tokens}, **standing)
    assert (found, reason_kind(found)) == (told, "max_seq_len" if told else "other")


def test_of_several_reasons_the_first_of_the_table_is_given() -> None:
    request = {
        "lora": "x", "required_taints": ("a",), "pinned_worker": "w1", "pinned_dp_rank": 1, "tried": (rank("w0/0"),),
    }  # fmt: skip
    standing: dict[str, Any] = {"unfit": "draining", "role": "decode", "max_seq_len": 1}
    found = []
    for cure in (
        {"unfit": ""}, {"role": "aggregated"}, {"loras": ("x",)}, {"taints": ("a",)}, {"max_seq_len": 0}, {},
    ):  # fmt: skip
        why = reason(request, **standing)
        found.append((why.split()[0].rstrip(":"), reason_kind(why)))
        standing |= cure
    assert found == [
        ("draining", "other"), ("role", "other"), ("lora", "lora"), ("taint", "taint"), ("max_seq_len", "max_seq_len"),
        ("pinned", "pinned"),
    ]  # fmt: skip


def test_each_rank_has_its_own_reason_in_the_order_of_the_view() -> None:
    moment = view(row("w0/0"), row("w0/1", unfit="draining"), row("w1/0"))
    assert exclusions(moment, route(pinned_worker="w0")) == ("", "draining", "pinned to w0")
