"""Another policy while the router runs: what may change, to which modes, and that nothing changes otherwise."""

import json

import pytest
from msgspec.structs import replace

from kv_runtime.config.loading import ConfigurationError
from router.decision.policies import MODES, Choice, Mode
from router.decision.policy import Policy
from router.decision.policy_store import swapped

_OWN = "fleet.rules:first"
_KNOWN = {**MODES, _OWN: Mode(lambda _candidates, _request, _policy, _seed: Choice(0, "user"))}


def test_a_users_own_mode_can_be_chosen() -> None:
    assert swapped(Policy(), {"mode": _OWN}, _KNOWN, replace_all=False).mode == _OWN
    assert swapped(Policy(), {"mode": _OWN}, _KNOWN, replace_all=True).mode == _OWN


def test_other_fields_change_while_a_users_own_mode_is_in_force() -> None:
    in_force = replace(Policy(), mode=_OWN)
    assert swapped(in_force, {"temperature": 0.5}, _KNOWN, replace_all=False) == replace(in_force, temperature=0.5)


@pytest.mark.parametrize("mode", ["os:system", None, 1, ["kv"], {"kv": 1}])
def test_a_mode_that_the_configuration_does_not_name_is_refused(mode: object) -> None:
    with pytest.raises(ConfigurationError) as raised:
        swapped(Policy(), {"mode": mode}, _KNOWN, replace_all=False)
    assert raised.value.problems[0].startswith(f"policy.mode: found {json.dumps(mode)}, allowed kv, ")


def problems_of(named: dict[str, object]) -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        swapped(Policy(), named, _KNOWN, replace_all=False)
    return raised.value.problems


def test_each_field_that_may_not_be_is_named_whatever_is_wrong_with_it() -> None:
    found = problems_of({"affinity": "strong", "overlap_credit": "x", "bogus": 1, "mode": None, "seed": None})
    assert [problem.partition(", allowed")[0].partition("; allowed")[0] for problem in found] == [
        "policy.bogus: unknown",
        "policy.seed: found null",
        "policy.mode: found null",
        'policy.overlap_credit: found "x"',
        'policy.affinity: found "strong"',
    ]


def test_the_first_8_problems_are_named_and_the_others_are_counted() -> None:
    found = problems_of({f"unknown{at}": at for at in range(20)} | {"temperature": "x"})
    assert [problem.partition(":")[0] for problem in found[:-1]] == [f"policy.unknown{at}" for at in range(8)]
    assert found[-1] == "and 13 more"


def test_a_key_is_shown_up_to_80_characters_and_the_nearest_is_sought_for_no_longer_ones() -> None:
    longest = ".temperature".rjust(80, "x")
    assert problems_of({longest: 1})[0].endswith("; nearest: temperature")
    longer = problems_of({f"x{longest}": 1})[0]
    assert longer.startswith(f"policy.x{longest[:79]}...: unknown; allowed: mode, ")
    assert "nearest" not in longer
