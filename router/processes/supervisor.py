"""The parent of a router's processes: forks them, starts those again that end, and ends with the last of them.

    start    by stage: a stage's processes are forked once all of the former one have said that they have started
    then     a process that ends is started again after a pause; one that ends too often ends all
    frozen   a process whose heartbeat stands still for `FROZEN_LOOKS` looks is killed, and so started again
    stop     SIGTERM or SIGINT: processes get SIGTERM, the last stage first, and are killed after `Role.stop_s`; a
             second signal cuts off what they still do, and kills after `AT_ONCE_S`, a third at once

A child is a fork, and nothing is imported or loaded twice: its pages are the parent's until it writes to them. So the
parent has no event loop, no thread and no connection. A child leaves the terminal's process group, so that Ctrl-C
reaches the parent alone. When the parent is gone, however it ended, `Child.parent` is at its end, and the child stops.
"""

import json
import math
import mmap
import os
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

import structlog

from kv_runtime.clock import Clock, SystemClock
from kv_runtime.process import STOP_SIGNALS
from kv_runtime.supervise import RESTARTS, Restarts
from router.processes.metrics import ProcessState
from router.processes.shared_pages import shared_pages

BEAT_S = 0.25
"""Time between two heartbeats of a process."""
LOOK_S = 1.0
FROZEN_LOOKS = 10
"""Looks in a row that find no new heartbeat of a frozen process. Looks are counted, not seconds: a parent that did not
run either learns nothing of its processes by that."""
AT_ONCE_S = 1.0
_TOLD_BYTES_MAX = 1 << 16
_BEATS_BYTES = 8
_COUNT = struct.Struct("<III")
"""Of one process in `Tally`: its id, whether it has started, and how often it was started again."""

_log = structlog.get_logger("router")


class ProcessesFailed(Exception):
    """A process could not start, or ended too often; all have ended."""


class Child(NamedTuple):
    """What a process has of its parent."""

    parent: int
    """A descriptor that is at its end once the parent is gone."""
    told: dict[str, dict[str, Any]]
    """What processes of former stages said when they had started, by name."""
    say: Callable[[dict[str, Any]], None]
    """Say that this process has started; JSON."""
    beat: Callable[[], None]
    """Say that this process runs. One that never did so is not found to be frozen."""


class Role(NamedTuple):
    """One process: its name, its stage, its work, and what the parent does when it has ended."""

    name: str
    stage: int
    work: Callable[[Child], None]
    stop_s: float = 10.0
    """How long it may take to end once it was asked to; then it is killed."""
    on_ended: Callable[[], None] = lambda: None


class Tally:
    """The states of all processes: the parent writes, the processes read; and their heartbeats, which each counts."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._memory = mmap.mmap(-1, _COUNT.size * len(self._names))
        self._beats = memoryview(mmap.mmap(-1, _BEATS_BYTES * len(self._names))).cast("Q")

    def beat(self, name: str) -> None:
        """Count a heartbeat of this process."""
        self._beats[self._names.index(name)] += 1

    def beats(self, name: str) -> int:
        """Return the number of heartbeats so far; a process that was started again goes on counting."""
        return self._beats[self._names.index(name)]

    def write(self, state: ProcessState) -> None:
        """Replace the state of a process."""
        at = _COUNT.size * self._names.index(state.name)
        _COUNT.pack_into(self._memory, at, state.pid, state.is_up, state.restarts)

    def read(self) -> list[ProcessState]:
        """Return the states in the order of the names."""
        counts = zip(self._names, _COUNT.iter_unpack(self._memory[:]), strict=True)
        return [ProcessState(name, pid, bool(is_up), restarts) for name, (pid, is_up, restarts) in counts]


class _Process:
    """A role, and its process while there is one."""

    def __init__(self, role: Role, failures_max: int) -> None:
        self.role = role
        self.pid = 0
        """0: there is none."""
        self.pipe = -1
        self.said = b""
        self.has_started = False
        """Whether this process, or one before it, has said so."""
        self.due_s: float | None = None
        """When it is to be started again."""
        self.kill_at_s: float | None = None
        """When it is killed; None: it was not asked to stop."""
        self.beats = self.still_looks = 0
        """Heartbeats at the last look, and the looks since the last new one."""
        self.failed_at_s: deque[float] = deque(maxlen=failures_max)
        self.restarts = 0

    @property
    def has_said(self) -> bool:
        """Whether this process has said that it has started."""
        return b"\n" in self.said


class Supervisor:
    """Runs roles as processes."""

    def __init__(
        self,
        roles: Sequence[Role],
        tally: Tally,
        *,
        restarts: Restarts = RESTARTS,
        clock: Clock | None = None,
        look_s: float = LOOK_S,
    ) -> None:
        self._processes = [_Process(role, restarts.failures_max) for role in sorted(roles, key=lambda role: role.stage)]
        self._tally, self._restarts, self._clock = tally, restarts, clock or SystemClock()
        self._look_s, self._looked_s = look_s, self._clock.now()
        self._selector = selectors.DefaultSelector()
        self._life = os.pipe()
        self._stops = self._signals_passed_on = 0
        self._failure = ""
        self.told: dict[str, dict[str, Any]] = {}

    def run(self, on_started: Callable[[], None], on_stopping: Callable[[], None]) -> None:
        """Return when all processes have ended after a stop.

        `on_started` is called once all have started, `on_stopping` when a stop begins.

        Raises:
            ProcessesFailed: one could not start, ended too often, or did not end as it should.
        """
        with shared_pages():
            self._run(on_started, on_stopping)
        if self._failure:
            raise ProcessesFailed(self._failure)

    def _run(self, on_started: Callable[[], None], on_stopping: Callable[[], None]) -> None:
        with self._signals():
            is_announced = is_stopping = False
            while not is_stopping or any(each.pid for each in self._processes):
                if is_stopping:
                    self._stop_next()
                else:
                    self._start_next()
                    if not is_announced and all(each.has_started for each in self._processes):
                        is_announced = True
                        on_started()
                self._wait()
                self._look()
                if not is_stopping and (self._stops or self._failure):
                    is_stopping = True
                    on_stopping()

    # ---------------------------------------------------------------------------------------------- start and stop

    def _start_next(self) -> None:
        """Fork what is due: of the first stage that has not wholly started, and what is to be started again."""
        now_s = self._clock.now()
        open_stage = min((each.role.stage for each in self._processes if not each.has_started), default=None)
        for each in self._processes:
            is_first = not each.has_started and each.role.stage == open_stage
            if not each.pid and (is_first if each.due_s is None else each.due_s <= now_s):
                self._fork(each)

    def _stop_next(self) -> None:
        """Signal the last stage that still has processes; on a further signal, all. Kill those whose time is over."""
        now_s = self._clock.now()
        living = [each for each in self._processes if each.pid]
        last = max((each.role.stage for each in living), default=0)
        for each in living:
            if each.role.stage == last and each.kill_at_s is None:
                self._ask_to_stop(each, now_s + each.role.stop_s)
        further = max(self._stops - 1, 0)
        if further > self._signals_passed_on:
            self._signals_passed_on = further
            for each in living:
                self._ask_to_stop(each, now_s + (AT_ONCE_S if further == 1 else 0.0))
        for each in living:
            if each.kill_at_s is not None and each.kill_at_s <= now_s:
                self._kill(each, "it did not end in time")

    def _ask_to_stop(self, process: _Process, kill_at_s: float) -> None:
        process.kill_at_s = kill_at_s
        _signal(process.pid, signal.SIGTERM)

    def _kill(self, process: _Process, why: str) -> None:
        process.kill_at_s = math.inf
        _log.error("process_killed", process=process.role.name, why=why)
        _signal(process.pid, signal.SIGKILL)

    def _look(self) -> None:
        """Kill what is frozen, of the first stage alone: later ones may wait for that, and get their time anew."""
        now_s = self._clock.now()
        if now_s - self._looked_s < self._look_s:
            return
        self._looked_s = now_s
        for each in self._processes:
            before, each.beats = each.beats, self._tally.beats(each.role.name)
            each.still_looks = each.still_looks + 1 if each.has_said and each.beats == before > 0 else 0
        frozen = [each for each in self._processes if each.pid and each.still_looks >= FROZEN_LOOKS]
        for each in frozen:
            if each.role.stage == frozen[0].role.stage:
                self._kill(each, "it is frozen")
        for each in self._processes if frozen else ():
            each.still_looks = 0

    # ---------------------------------------------------------------------------------------------- processes

    def _fork(self, process: _Process) -> None:
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # one that comes now waits for the child's own handlers
        pid = os.fork()
        if pid == 0:
            self._become(process.role, write)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        os.close(write)
        process.pid, process.pipe, process.due_s, process.still_looks = pid, read, None, 0
        self._selector.register(read, selectors.EVENT_READ, process)

    def _become(self, role: Role, write: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (*STOP_SIGNALS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            os.setpgid(0, 0)
            self._close()
            structlog.contextvars.bind_contextvars(process=role.name)

            def say(what: dict[str, Any]) -> None:
                os.write(write, json.dumps(what).encode() + b"\n")

            role.work(Child(self._life[0], self.told, say, lambda: self._tally.beat(role.name)))
            code = 0
        except SystemExit as error:
            code = _exit_code(error)
        except BaseException:  # noqa: BLE001 - nothing of the parent may run on in the child
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _close(self) -> None:
        """Close what is the parent's, in a child."""
        os.close(self._life[1])
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def _reap(self) -> None:
        for process in self._processes:
            if process.pid:
                pid, status = os.waitpid(process.pid, os.WNOHANG)
                if pid:
                    self._on_ended(process, os.waitstatus_to_exitcode(status))

    def _on_ended(self, process: _Process, code: int) -> None:
        self._read(process)
        self._selector.unregister(process.pipe)
        os.close(process.pipe)
        name, process.pid, process.said, process.kill_at_s = process.role.name, 0, b"", None
        process.role.on_ended()
        self._tally.write(ProcessState(name, 0, is_up=False, restarts=process.restarts))
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if self._stops or self._failure:
            if code and not self._failure:
                self._failure = f"process {name} {how}"
            return
        if not process.has_started:
            self._failure = f"process {name} {how} before it had started"
            return
        self._start_again(process, how)

    def _start_again(self, process: _Process, how: str) -> None:
        now_s, allowed = self._clock.now(), self._restarts
        process.failed_at_s.append(now_s)
        recent = sum(now_s - each < allowed.window_s for each in process.failed_at_s)
        if recent >= allowed.failures_max:
            self._failure = f"process {process.role.name} {how}, {recent} times in {allowed.window_s:g} s"
            return
        pause_s = allowed.pause_after_s(recent)
        process.due_s, process.restarts = now_s + pause_s, process.restarts + 1
        _log.error("process_ended", process=process.role.name, how=how, starts_again_in_s=pause_s)

    # ---------------------------------------------------------------------------------------------- waiting

    def _wait(self) -> None:
        """Wait for a signal, the end of a process, what one says, or the time to start or kill one, or to look."""
        now_s = self._clock.now()
        is_stopping = bool(self._stops or self._failure)
        times_s = [each.kill_at_s if is_stopping else each.due_s for each in self._processes]
        next_s = min([each for each in times_s if each is not None], default=math.inf)
        for key, _ in self._selector.select(max(0.0, min(next_s - now_s, self._look_s))):
            if key.data is None:
                with suppress(BlockingIOError):
                    os.read(key.fd, 4096)
            else:
                self._read(key.data)
        self._reap()

    def _read(self, process: _Process) -> None:
        """Read what the process has said; its line says that it has started."""
        with suppress(BlockingIOError):
            os.set_blocking(process.pipe, False)
            process.said += os.read(process.pipe, _TOLD_BYTES_MAX)
        line, ends, _ = process.said.partition(b"\n")
        if ends and process.role.name not in self.told:
            self.told[process.role.name] = json.loads(line)
        if ends and process.pid:
            process.has_started = True
            self._tally.write(ProcessState(process.role.name, process.pid, is_up=True, restarts=process.restarts))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let signals wake the parent, and count those that ask it to stop."""
        woken, wakes = socket.socketpair()
        woken.setblocking(False)  # noqa: FBT003 - the system's signature
        wakes.setblocking(False)  # noqa: FBT003
        self._selector.register(woken, selectors.EVENT_READ)

        def on_stop(*_: object) -> None:
            self._stops += 1

        former = {number: signal.signal(number, on_stop) for number in STOP_SIGNALS}
        former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        wakeup = signal.set_wakeup_fd(wakes.fileno())
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in former.items():
                signal.signal(number, handler)
            self._selector.unregister(woken)
            woken.close()
            wakes.close()


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _exit_code(error: SystemExit) -> int:
    """Return the code, and print a reason as the interpreter would."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1
