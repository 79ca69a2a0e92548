"""Modes by name, and another policy while the router runs: what may change, and that nothing changes otherwise."""

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from kv_protocol.decided import RouteRequest
from kv_runtime.config.loading import ConfigurationError
from router.decision.policies import MODES, Candidates, Choice, Mode
from router.decision.policy import Policy
from router.decision.policy_config import PolicySection, load_modes
from router.decision.policy_store import swapped
from tests.support.decide import decide
from tests.support.paths import ROOT
from tests.unit.router.plane import running_plane, until
from tests.unit.router.samples import route, row, view
from tests.unit.router.upstream import Upstream, answers, completion, says_and_waits

_OWN = "fleet.rules:first"
_KNOWN = {**MODES, _OWN: Mode(lambda _candidates, _request, _policy, _seed: Choice(0, "user"))}


def test_a_users_own_mode_can_be_chosen() -> None:
    assert swapped(Policy(), {"mode": _OWN}, _KNOWN, replace_all=False).mode == _OWN
    assert swapped(Policy(), {"mode": _OWN}, _KNOWN, replace_all=True).mode == _OWN


def test_other_fields_change_while_a_users_own_mode_is_in_force() -> None:
    in_force = replace(Policy(), mode=_OWN)
    assert swapped(in_force, {"temperature": 0.5}, _KNOWN, replace_all=False) == replace(in_force, temperature=0.5)


@pytest.mark.parametrize("mode", ["os:system", None, 1, ["kv"], {"kv": 1}])
def test_no_policy_is_swapped_for_one_of_a_mode_that_the_configuration_does_not_name(mode: object) -> None:
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


HERE = __name__


def last(candidates: Candidates, _request: RouteRequest, _policy: Policy, _seed: int) -> int:
    return len(candidates.rank_indices) - 1


def turned(candidates: Candidates, _request: RouteRequest, _policy: Policy, _seed: int) -> Choice:
    return Choice(candidates.columns.turn % 2, "turn")


turned.reads_overlap = turned.reads_load = False  # type: ignore[attr-defined]


def beyond(_candidates: Candidates, _request: RouteRequest, _policy: Policy, _seed: int) -> int:
    return 99


def two(_candidates: Candidates, _request: RouteRequest) -> int:
    return 0


def defective(candidates: Candidates, request: RouteRequest, _policy: Policy, _seed: int) -> int:
    if request.priority == UNLUCKY or request.tried:
        raise ValueError("this mode has a defect")
    return len(candidates.rank_indices) - 1


NUMBER, UNLUCKY = 7, 13
DEFECTIVE = f"{HERE}:defective"


def test_the_built_in_modes_are_there_without_a_word() -> None:
    assert dict(load_modes(())) == MODES


def test_a_users_function_is_a_mode_by_its_name() -> None:
    name = f"{HERE}:last"
    modes = load_modes((name,))
    assert set(modes) == {*MODES, name}
    assert (modes[name].reads_overlap, modes[name].reads_load, modes[name].reads_rates) == (True, True, False)
    found = decide(view(row("w0/0"), row("w1/0")), route(), Policy(mode=name), 1, modes)
    assert (str(found.winner), found.reason, found.policy) == ("w1/0", "user", name)


def test_a_function_says_by_its_attributes_what_it_reads() -> None:
    name = f"{HERE}:turned"
    modes = load_modes((name,))
    assert modes[name][1:] == (False, False, False)
    assert decide(view(row("w0/0"), row("w1/0"), turn=1), route(), Policy(mode=name), 1, modes).reason == "turn"


def test_a_choice_of_no_candidate_is_refused_with_the_allowed_ones() -> None:
    name = f"{HERE}:beyond"
    with pytest.raises(Exception, match=r"winner: found 99, allowed one of 1 candidates"):
        decide(view(row()), route(), Policy(mode=name), 1, load_modes((name,)))


async def test_a_mode_that_raises_fails_the_request_that_waited_and_the_others_go_on() -> None:
    async with (
        running_plane(queue={"threshold": 0.0}, modes=load_modes((DEFECTIVE,))) as plane,
        Upstream(says_and_waits(b"")) as busy,
        Upstream(answers(200, completion())) as free,
    ):
        plane.join("w0", busy.base_url)
        _, running = await plane.dial()
        await until(lambda: bool(busy.received))
        plane.routing.set_policy(Policy(mode=DEFECTIVE))
        waiting = [asyncio.ensure_future(plane.post({"priority": priority})) for priority in (UNLUCKY, 0)]
        await until(lambda: len(plane.admission.queue) == 2)
        plane.join("w1", free.base_url)
        plane.admission.poke()
        assert [(await each).status for each in waiting] == [500, 200]
        running.close()


async def test_a_mode_that_raises_for_a_request_that_is_tried_again_fails_it() -> None:
    async with (
        running_plane(policy=Policy(mode=DEFECTIVE), modes=load_modes((DEFECTIVE,))) as plane,
        Upstream(answers(200, completion())) as good,
        Upstream(answers(500)) as failing,
    ):
        plane.join("w0", good.base_url)
        plane.join("w1", failing.base_url)
        answered = await plane.post()
        assert (answered.status, answered.error["type"], good.received) == (500, "server_error", [])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("nonsense", "allowed package.module:function"),
        (f"{HERE}:", "allowed package.module:function"),
        (":last", "allowed package.module:function"),
        ("no.such.module:choose", "found No module named 'no'"),
        (f"{HERE}:absent", "has no attribute 'absent'"),
        (f"{HERE}:NUMBER", "found int, allowed a function"),
        (f"{HERE}:two", "allowed (candidates, request, policy, seed)"),
    ],
)
def test_a_name_that_is_no_mode_is_refused_and_named(name: str, found: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_modes((name,))
    (problem,) = raised.value.problems
    assert problem.startswith(f"policy.user_modes: {name!r}: found ")
    assert found in problem


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_modes(("nonsense", f"{HERE}:last", f"{HERE}:two"))
    assert len(raised.value.problems) == 2


def test_a_mode_that_the_configuration_does_not_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"allowed kv, predicted-ttft, "):
        PolicySection(mode="os:system")


def test_the_example_of_the_documentation_is_a_mode_that_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs/OPERATIONS.md").read_text().split("### A mode of your own", 1)[1]
    (tmp_path / "example_mode.py").write_text(text.split("```python\n", 1)[1].split("```", 1)[0])
    monkeypatch.syspath_prepend(tmp_path)
    name = "example_mode:fewest_blocks"
    rows = row("w0/0", overlap_blocks=(1, 1, 1, 1)), row("w1/0", overlap_blocks=(3, 3, 3, 3), active_blocks=1)
    found = decide(view(*rows), route(64), Policy(mode=name), 1, load_modes((name,)))
    assert (str(found.winner), found.reason) == ("w1/0", "user")
    assert found.cost_list() == [3.0, 2.0]
    assert found.decision().candidates[0].terms.cost == 3.0
