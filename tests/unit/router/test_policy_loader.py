"""Modes by name: only those of the configuration, and what is wrong with one is said."""

from pathlib import Path

import pytest

from kv_protocol.decided import RouteRequest
from kv_runtime.config.loading import ConfigurationError
from router.decision.policies import MODES, Candidates, Choice
from router.decision.policy import Policy
from router.decision.policy_loader import load_modes
from tests.support.decide import decide
from tests.support.paths import ROOT
from tests.unit.router.samples import route, row, view

HERE = __name__


def last(candidates: Candidates, _request: RouteRequest, _policy: Policy, _seed: int) -> int:
    return len(candidates.rank_indices) - 1


def turned(candidates: Candidates, _request: RouteRequest, _policy: Policy, _seed: int) -> Choice:
    return Choice(candidates.view.turn % 2, "turn")


turned.reads_overlap = turned.reads_load = False  # type: ignore[attr-defined]


def beyond(_candidates: Candidates, _request: RouteRequest, _policy: Policy, _seed: int) -> int:
    return 99


def two(_candidates: Candidates, _request: RouteRequest) -> int:
    return 0


NUMBER = 7


def test_the_built_in_modes_are_there_without_a_word() -> None:
    assert dict(load_modes((), "kv")) == MODES


def test_a_users_function_is_a_mode_by_its_name() -> None:
    name = f"{HERE}:last"
    modes = load_modes((name,), name)
    assert set(modes) == {*MODES, name}
    assert (modes[name].reads_overlap, modes[name].reads_load, modes[name].reads_rates) == (True, True, False)
    found = decide(view(row("w0/0"), row("w1/0")), route(), Policy(mode=name), 1, modes)
    assert (str(found.winner), found.reason, found.policy) == ("w1/0", "user", name)


def test_a_function_says_by_its_attributes_what_it_reads() -> None:
    name = f"{HERE}:turned"
    modes = load_modes((name,), "kv")
    assert modes[name][1:] == (False, False, False)
    assert decide(view(row("w0/0"), row("w1/0"), turn=1), route(), Policy(mode=name), 1, modes).reason == "turn"


def test_a_choice_of_no_candidate_is_refused_with_the_allowed_ones() -> None:
    name = f"{HERE}:beyond"
    with pytest.raises(Exception, match=r"winner: found 99, allowed one of 1 candidates"):
        decide(view(row()), route(), Policy(mode=name), 1, load_modes((name,), name))


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
        load_modes((name,), "kv")
    (problem,) = raised.value.problems
    assert problem.startswith(f"policy.user_modes: {name!r}: found ")
    assert found in problem


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_modes(("nonsense", f"{HERE}:last", f"{HERE}:two"), "kv")
    assert len(raised.value.problems) == 2


def test_a_mode_that_the_configuration_does_not_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"policy\.mode: found 'os:system', allowed kv, predicted-ttft, "):
        load_modes((), "os:system")


def test_the_example_of_the_documentation_is_a_mode_that_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs/OPERATIONS.md").read_text().split("### A mode of your own", 1)[1]
    (tmp_path / "example_mode.py").write_text(text.split("```python\n", 1)[1].split("```", 1)[0])
    monkeypatch.syspath_prepend(tmp_path)
    name = "example_mode:fewest_blocks"
    rows = row("w0/0", overlap_blocks=(1, 1, 1, 1)), row("w1/0", overlap_blocks=(3, 3, 3, 3), active_blocks=1)
    found = decide(view(*rows), route(64), Policy(mode=name), 1, load_modes((name,), name))
    assert (str(found.winner), found.reason) == ("w1/0", "user")
    assert found.cost_list() == [3.0, 2.0]
    assert found.decision().candidates[0].terms.cost == 3.0
