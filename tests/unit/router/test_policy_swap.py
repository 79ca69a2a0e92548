"""Another policy while the router runs: what may change, to which modes, and that nothing changes otherwise."""

import pytest
from msgspec.structs import replace

from kv_runtime.config import ConfigurationError
from router.core.policies import MODES, Choice, Mode
from router.core.policy import Policy
from router.policy_swap import swapped

_OWN = "fleet.rules:first"
_KNOWN = {**MODES, _OWN: Mode(lambda _candidates, _request, _policy, _seed: Choice(0, "user"))}


def test_a_users_own_mode_can_be_chosen() -> None:
    assert swapped(Policy(), {"mode": _OWN}, _KNOWN, whole=False).mode == _OWN
    assert swapped(Policy(), {"mode": _OWN}, _KNOWN, whole=True).mode == _OWN


def test_other_fields_change_while_a_users_own_mode_is_in_force() -> None:
    in_force = replace(Policy(), mode=_OWN)
    assert swapped(in_force, {"temperature": 0.5}, _KNOWN, whole=False) == replace(in_force, temperature=0.5)


@pytest.mark.parametrize("mode", ["os:system", None, 1, ["kv"], {"kv": 1}])
def test_a_mode_that_the_configuration_does_not_name_is_refused(mode: object) -> None:
    with pytest.raises(ConfigurationError) as raised:
        swapped(Policy(), {"mode": mode}, _KNOWN, whole=False)
    assert raised.value.problems[0].startswith(f"policy.mode: found {mode!r}, allowed kv, ")
