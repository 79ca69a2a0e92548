"""Which screen is shown and what is selected there: (state, key) -> state. Pure.

workers, decisions   up, down: select    enter: open the selected one    w, d, tab: the other list    q: end
worker, decision     up, down: scroll    escape, backspace, left: back
"""

from typing import Literal, NamedTuple

from router.top.pages import Snapshot

View = Literal["workers", "worker", "decisions", "decision"]
Key = str
"""`up`, `down`, `page_up`, `page_down`, `enter`, `back`, `tab`, or the character that was typed."""
PAGE = 10
_SEQUENCES = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\x1b[D": "back", b"\x1bOD": "back",
    b"\x1b[C": "enter", b"\x1bOC": "enter", b"\x1b[5~": "page_up", b"\x1b[6~": "page_down",
    b"\r": "enter", b"\n": "enter", b"\x7f": "back", b"\x08": "back", b"\t": "tab", b"\x1b": "back",
}  # fmt: skip
"""Of xterm and what follows it, in both cursor modes. Source: XTerm Control Sequences, "PC-Style Function Keys"."""
_BY_LENGTH = sorted(_SEQUENCES, key=len, reverse=True)
_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "page_up": -PAGE, "page_down": PAGE}


class State(NamedTuple):
    """What is shown. `row` is the selected row of a list, or the first line that is shown of a page."""

    view: View = "workers"
    row: int = 0
    of: str = ""
    """The id of the worker or decision that is shown."""
    came_from: "State | None" = None
    is_over: bool = False


def keys(data: bytes) -> list[Key]:
    """Return the keys that were typed; unknown sequences are left out."""
    found = list[Key]()
    while data:
        known = next((each for each in _BY_LENGTH if data.startswith(each)), None)
        if data[:2] in (b"\x1b[", b"\x1bO") and known == b"\x1b":
            data = data[2:].lstrip(b"0123456789;")[1:]
            continue
        if known is not None:
            found.append(_SEQUENCES[known])
        elif 0x20 <= data[0] < 0x7F:  # noqa: PLR2004 - printable ASCII
            found.append(chr(data[0]))
        data = data[len(known or b".") :]
    return found


def pressed(state: State, key: Key, snapshot: Snapshot) -> State:
    """Return what is shown after the key; an unknown key changes nothing."""
    if key == "q":
        return state._replace(is_over=True)
    if key in _MOVES:
        return _moved(state, _MOVES[key], snapshot)
    if key == "back":
        return state.came_from or state
    if key in ("w", "d") or (key == "tab" and state.view in ("workers", "decisions")):
        view: View = "decisions" if key == "d" or (key == "tab" and state.view == "workers") else "workers"
        return state if state.view == view else State(view)
    return _opened(state, snapshot) if key == "enter" else state


def shown_row(state: State, snapshot: Snapshot) -> int:
    """Return the selected row of a list, within what there is."""
    count = len(snapshot.workers) if state.view == "workers" else len(snapshot.decisions)
    return max(0, min(state.row, count - 1))


def _moved(state: State, by: int, snapshot: Snapshot) -> State:
    row = shown_row(state, snapshot) if state.view in ("workers", "decisions") else state.row
    moved = state._replace(row=max(0, row + by))
    return moved._replace(row=shown_row(moved, snapshot)) if state.view in ("workers", "decisions") else moved


def _opened(state: State, snapshot: Snapshot) -> State:
    row = shown_row(state, snapshot)
    if state.view == "workers" and snapshot.workers:
        return State("worker", of=snapshot.workers[row].worker_id, came_from=state)
    if state.view == "decisions" and snapshot.decisions:
        return State("decision", of=snapshot.decisions[row].decision_id, came_from=state)
    return state
