"""The parent of processes: when it starts them, how it stops them, and what it does when one ends.

A parent runs in a process of its own, which forks; it and its children write what they do into one file.
"""

import os
import select
import signal
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kv_runtime.supervise import Restarts
from router.processes.supervisor import LOOK_S, Child, ProcessesFailed, Role, Supervisor, Tally

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

TURNS, TURN_S = 3_000, 0.01
QUICK = Restarts(failures_max=3, window_s=60.0, pause_s=0.01, pause_max_s=0.01)
Roles = Callable[[Path], list[Role]]


def note(file: Path, words: str) -> None:
    with file.open("a") as notes:
        notes.write(f"{words}\n")


def until_stopped(name: str, file: Path, child: Child) -> None:
    """Start, and end at SIGTERM or with the parent."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    note(file, f"{name} begins, knows {sorted(child.told)}")
    child.say({"pid": os.getpid()})
    while not select.select([child.parent], [], [], 0.01)[0]:
        if signal.sigtimedwait({signal.SIGTERM}, 0) is not None:
            note(file, f"{name} stops")
            return
    note(file, f"{name} is alone")


def deaf(file: Path, child: Child) -> None:
    """Start, and ignore being asked to end."""
    heard = list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    child.say({})
    noted = 0
    while True:
        select.select([child.parent], [], [], 0.01)
        if len(heard) > noted:
            noted = len(heard)
            note(file, f"deaf was asked {noted}")


def freezes(file: Path, child: Child) -> None:
    """Start, have a heartbeat, and stand still."""
    note(file, "freezes begins")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one that comes before it stands still
    child.beat()
    child.say({})
    os.kill(os.getpid(), signal.SIGSTOP)


def refuses(_: Path, child: Child) -> None:
    del child
    sys.exit("it cannot be done")


def dies_after_start(file: Path, child: Child) -> None:
    note(file, "dies begins")
    child.say({})
    os.kill(os.getpid(), signal.SIGKILL)


def two_stages(file: Path) -> list[Role]:
    second = [Role(name, 2, partial(until_stopped, name, file)) for name in ("b", "c")]
    return [*second, Role("a", 1, partial(until_stopped, "a", file))]


def one_deaf(file: Path) -> list[Role]:
    return [Role("a", 1, partial(until_stopped, "a", file)), Role("deaf", 2, partial(deaf, file))]


def one_frozen(file: Path) -> list[Role]:
    return [Role("a", 1, partial(until_stopped, "a", file)), Role("freezes", 2, partial(freezes, file), stop_s=0.1)]


def one_that_refuses(file: Path) -> list[Role]:
    return [Role("a", 1, partial(until_stopped, "a", file)), Role("refuses", 2, partial(refuses, file))]


def one_that_dies(file: Path) -> list[Role]:
    dies = Role("dies", 1, partial(dies_after_start, file), on_ended=lambda: note(file, "its end was told"))
    return [dies, Role("a", 1, partial(until_stopped, "a", file))]


def supervise(roles: Roles, file: Path, look_s: float) -> None:
    """Run the parent."""
    made = roles(file)
    supervisor = Supervisor(made, Tally([role.name for role in made]), restarts=QUICK, look_s=look_s)
    try:
        supervisor.run(partial(note, file, "started"), partial(note, file, "stopping"))
    except ProcessesFailed as error:
        note(file, f"failed: {error}")
    note(file, "over")


class Parent:
    def __init__(self, roles: Roles, file: Path, *, look_s: float = LOOK_S) -> None:
        self.file = file
        file.touch()
        self.process: SpawnProcess = get_context("spawn").Process(target=supervise, args=(roles, file, look_s))
        self.process.start()

    def notes(self) -> list[str]:
        return self.file.read_text().splitlines()

    def until(self, words: str) -> list[str]:
        """Return the notes once these are among them."""
        for _ in range(TURNS):
            if words in self.notes():
                return self.notes()
            self.process.join(TURN_S)
            select.select([], [], [], TURN_S)
        raise AssertionError(self.notes())

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "notes"


def test_a_stage_starts_when_the_former_has_and_stops_before_it(file: Path) -> None:
    parent = Parent(two_stages, file)
    notes = parent.until("started")
    assert notes[0] == "a begins, knows []"
    assert sorted(notes[1:3]) == ["b begins, knows ['a']", "c begins, knows ['a']"]
    parent.signal(signal.SIGTERM)
    notes = parent.until("over")
    assert (notes[4], sorted(notes[5:7]), notes[7:]) == ("stopping", ["b stops", "c stops"], ["a stops", "over"])


@pytest.mark.parametrize("signals", [2, 3])
def test_a_second_signal_is_passed_on_and_kills_after_a_second_and_a_third_at_once(file: Path, signals: int) -> None:
    parent = Parent(one_deaf, file)
    parent.until("started")
    for number in range(1, signals + 1):
        parent.signal(signal.SIGINT)
        if number < 3:
            parent.until(f"deaf was asked {number}")
    assert parent.until("over")[-2] == "failed: process deaf was killed by SIGKILL"


def test_a_frozen_process_is_killed_when_its_time_to_stop_is_over(file: Path) -> None:
    parent = Parent(one_frozen, file)
    parent.until("started")
    parent.signal(signal.SIGTERM)
    assert parent.until("over")[-3:] == ["a stops", "failed: process freezes was killed by SIGKILL", "over"]


def test_a_frozen_process_is_killed_and_started_again(file: Path) -> None:
    notes = Parent(one_frozen, file, look_s=0.01).until("over")
    assert notes.count("freezes begins") == 3
    assert notes[-2] == "failed: process freezes was killed by SIGKILL, 3 times in 60 s"


def test_a_process_that_cannot_start_ends_the_others(file: Path) -> None:
    notes = Parent(one_that_refuses, file).until("over")
    assert "started" not in notes
    assert notes[-3:] == [
        "a stops",
        "failed: process refuses ended with exit code 1 before it had started",
        "over",
    ]


def test_a_process_that_ends_is_started_again_until_it_has_ended_too_often(file: Path) -> None:
    notes = Parent(one_that_dies, file).until("over")
    assert (notes.count("dies begins"), notes.count("its end was told")) == (3, 3)
    assert "a stops" in notes
    assert notes[-2] == "failed: process dies was killed by SIGKILL, 3 times in 60 s"


def test_without_their_parent_processes_know_that_they_are_alone(file: Path) -> None:
    parent = Parent(two_stages, file)
    parent.until("started")
    parent.signal(signal.SIGKILL)
    for name in "abc":
        parent.until(f"{name} is alone")
