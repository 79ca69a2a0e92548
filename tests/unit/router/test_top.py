"""The screens of `router top` as pure functions: what is shown, what keys do, and what a hostile name cannot do."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.top.keys import State, keys, pressed
from router.top.pages import (
    Decision,
    Explained,
    Labels,
    Metrics,
    Outcome,
    Rank,
    Registration,
    Snapshot,
    Worker,
    decisions_of,
    explained_of,
    workers_of,
)
from router.top.screens import HEIGHT, WIDTH, clean, page, screen
from router.top.terminal import as_text

EVIL = "\x1b[2J\x1b]0;x\x07[red]\n\r\u202e\x9b"
Samples = dict[str, dict[Labels, float]]
EXPLANATION = "Request r: 40 tokens for m. It went to w0/0.\n  w0/0: cost 4.0 = 1.0 x (wait 1.0 + prefill 3.0)"


def worker(worker_id: str = "w0", **changed: Any) -> Worker:
    return Worker(Registration(worker_id, "m", block_size=16), [Rank(0, "EXACT")], **changed)


def decision(decision_id: str = "d0", **changed: Any) -> Decision:
    fields: dict[str, Any] = {"age_s": 2.0, "request_id": "r", "worker_id": "w0", "dp_rank": 0, "policy": "kv"}
    sizes = {"isl_tokens": 100, "overlap_blocks": 3, "trust": "EXACT"}
    return Decision(decision_id=decision_id, **fields | sizes | changed)


def snapshot(**changed: Any) -> Snapshot:
    workers = (worker("w0"), worker("w1", unfit="silent"), worker("w2", draining=True))
    known = Snapshot("http://router", is_known=True, workers=workers, decisions=(decision("d0"), decision("d1")))
    return known._replace(**changed)


def texts(found: Snapshot, state: State = State(), **size: int) -> list[str]:  # noqa: B008 - immutable
    return [line.text for line in screen(found, state, **size)]


def typed(found: Snapshot, *names: str) -> State:
    state = State()
    for name in names:
        state = pressed(state, name, found)
    return state


# ------------------------------------------------------------------------------------------------- screens


def test_workers_have_their_state_their_load_and_their_rates() -> None:
    at = (("dp_rank", "0"), ("worker", "w0"))
    samples: Samples = {
        "kvrouter_ledger_active_requests": {at: 7.0},
        "kvrouter_ledger_prefill_tokens_queued": {at: 2048.0},
        "kvrouter_rate_factor": {(*at, ("work", "prefill")): 1.25, (*at, ("work", "decode")): 0.75},
    }
    shown = texts(snapshot(metrics=Metrics(samples)))
    row = next(line for line in shown if line.startswith("w0 "))
    assert row.split() == ["w0", "aggregated", "fit", "EXACT", "7", "2048", "0", "48", "1.25", "0.75"]
    assert [line.split()[2] for line in shown if line.startswith(("w1", "w2"))] == ["unfit", "draining"]


def test_the_head_has_rates_between_two_looks_and_latencies_of_the_newest_decisions() -> None:
    def counted(ok: float, failed: float) -> Metrics:
        return Metrics({"kvrouter_requests_total": {(("outcome", "ok"),): ok, (("outcome", "failed"),): failed}})

    ended = tuple(decision(outcome=Outcome("ok", ttft_s=at / 100)) for at in range(10))
    found = snapshot(metrics=counted(29, 3), before=counted(10, 2), passed_s=2.0, decisions=ended)
    head = "\n".join(texts(found)[:4])
    assert "requests 10.0/s" in head
    assert "failed 0.5/s" in head
    assert "TTFT p50 50.0ms  p90 90.0ms" in head
    assert "requests -" in "\n".join(texts(snapshot()))


def test_a_restarted_routers_counters_show_no_negative_rate() -> None:
    before = Metrics({"kvrouter_requests_total": {(): 9.0}})
    assert snapshot(before=before, passed_s=1.0).rate("requests_total") == 0.0


def test_advised_workers_are_shown_where_a_router_advises() -> None:
    of = (("model", "m"), ("role", "decode"))
    samples: Samples = {"kvrouter_planner_advised_workers": {of: 3.0}, "kvrouter_planner_workers": {of: 2.0}}
    assert "advised workers m decode: 3, there are 2" in texts(snapshot(metrics=Metrics(samples)))


def test_reused_tokens_are_the_workers_count_or_what_it_held() -> None:
    told = decision(outcome=Outcome("ok", cached_tokens=90))
    assert snapshot(decisions=(told,)).hit_ratio("w0") == 0.9
    assert snapshot(decisions=(decision(),)).hit_ratio("w0") == 0.48
    assert snapshot(decisions=()).hit_ratio("w0") is None


def test_a_router_that_does_not_answer_is_named_with_what_was_known_before() -> None:
    shown = texts(snapshot(problem="Connection refused", polls_failed=3))
    assert shown[1] == "NOT REACHED (3 tries): Connection refused; what follows is older"
    assert any(line.startswith("w0") for line in shown)
    never = texts(Snapshot("http://router", problem="Connection refused", polls_failed=1))
    assert never[1] == "NOT REACHED (trying again): Connection refused"


def test_the_plain_screen_has_all_workers_and_no_help() -> None:
    many = tuple(worker(f"w{number:03}") for number in range(100))
    shown = [line.text for line in page(snapshot(workers=many))]
    assert sum(line.startswith("w0") for line in shown) == 100
    assert not any("quit" in line for line in shown)


# ------------------------------------------------------------------------------------------------- keys


def test_a_worker_and_a_decision_open_and_close() -> None:
    found = snapshot(explained=Explained(EXPLANATION, Outcome("ok", cached_tokens=48)))
    opened = typed(found, "down", "enter")
    assert (opened.view, opened.of) == ("worker", "w1")
    assert "  takes no new work: silent" in texts(found, opened)
    assert typed(found, "down", "enter", "back") == typed(found, "down")
    explained = typed(found, "d", "down", "enter")
    assert (explained.view, explained.of) == ("decision", "d1")
    shown = "\n".join(texts(found, explained))
    assert "cost 4.0 = 1.0 x (wait 1.0 + prefill 3.0)" in shown
    assert "48 cached" in shown


def test_the_selection_stays_within_the_list_though_the_fleet_shrinks() -> None:
    state = typed(snapshot(), *["down"] * 9)
    assert (state.row, pressed(state, "up", snapshot()).row) == (2, 1)
    assert pressed(state, "enter", snapshot(workers=(worker("w9"),))).of == "w9"
    assert pressed(State(), "enter", snapshot(workers=())) == State()


def test_a_worker_that_left_is_said_to_have_left() -> None:
    assert "worker w0 has left the fleet" in texts(snapshot(workers=()), State("worker", of="w0"))


def test_a_long_list_scrolls_with_the_selection() -> None:
    found = snapshot(workers=tuple(worker(f"w{number:03}") for number in range(100)))
    (selected,) = [line for line in screen(found, State(row=70)) if line.style == "reverse"]
    assert selected.text.startswith("w070")


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (b"\x1b[A\x1b[B", ["up", "down"]),
        (b"\x1bOA\x1b[6~", ["up", "page_down"]),
        (b"\x1b", ["back"]),
        (b"\r\x7f\tq", ["enter", "back", "tab", "q"]),
        (b"\x1b[1;5Cw\x1b[15~d", ["w", "d"]),
        (b"\xff\x00", []),
    ],
)
def test_what_a_terminal_sends_are_keys(data: bytes, names: list[str]) -> None:
    assert keys(data) == names


def test_q_ends_it_everywhere() -> None:
    for before in ((), ("enter",), ("d",), ("d", "enter")):
        assert typed(snapshot(), *before, "q").is_over


# ------------------------------------------------------------------------------------------------- hostile names


def hostile(text: str) -> Snapshot:
    """Return a fleet in which every text of the network is this one."""
    known = Registration(text, text, text, text, text, text)
    of = (("model", text), ("role", text))
    return Snapshot(
        text,
        problem=text,
        is_known=True,
        workers=(Worker(known, [Rank(0, text, text, text)], unfit=text),),
        decisions=(decision(text, worker_id=text, outcome=Outcome(text)),),
        metrics=Metrics(
            {
                "kvrouter_planner_advised_workers": {of: 1.0},
            }
        ),
        explained=Explained(f"a\n{text}", Outcome(text)),
    )


VIEWS = (State(), State("decisions"), State("worker", of=EVIL), State("decision", of=EVIL))


@pytest.mark.parametrize("state", VIEWS, ids=lambda state: state.view)
def test_no_name_moves_the_cursor_or_styles_the_text(state: State) -> None:
    found = hostile(EVIL)
    for line in (*screen(found, state), *page(found)):
        assert line.text.isprintable(), repr(line.text)
    drawn = as_text(screen(found, state))
    assert drawn.plain == "\n".join(texts(found, state))
    assert "[red]" in drawn.plain
    assert {str(span.style) for span in drawn.spans} <= {"", "bold", "reverse", "red", "dim"}


@given(st.text(), st.integers(0, 3), st.integers(1, 200), st.integers(3, 60), st.integers(0, 50))
def test_a_screen_fits_whatever_was_answered(text: str, view: int, width: int, height: int, row: int) -> None:
    state = VIEWS[view]._replace(of=text, row=row)
    shown = screen(hostile(text), state, width=width, height=height)
    assert len(shown) <= height
    assert all(len(line.text) <= width and line.text.isprintable() for line in shown)


def test_ordinary_screens_fit_a_terminal_of_80_by_24() -> None:
    found = snapshot(explained=Explained(EXPLANATION))
    for state in (State(), State("decisions"), State("worker", of="w0"), State("decision", of="d0")):
        uncut = texts(found, state, width=1000, height=1000)
        assert max(map(len, uncut)) <= WIDTH, state.view
        assert len(texts(found, state)) <= HEIGHT


def test_clean_keeps_what_can_be_read() -> None:
    assert clean("Größe 模型 [b]") == "Größe 模型 [b]"
    assert clean("a\x1bb\u2028c") == "a?b?c"


@pytest.mark.parametrize("decode", [workers_of, decisions_of, explained_of], ids=["workers", "decisions", "explained"])
@pytest.mark.parametrize("body", [b"", b"[]", b'{"workers": 1, "decisions": 1}', b"<html>"])
def test_what_is_no_answer_of_a_router_is_refused(decode: Any, body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(body)
