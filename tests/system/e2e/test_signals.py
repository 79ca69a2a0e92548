"""Processes and Ctrl-C: each says what it drains, ends without a traceback, and leaves no process behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

END_S = 90.0
"""For a loaded machine; what is interrupted here would go on for minutes."""


@contextmanager
def interrupts_not_ignored() -> Iterator[None]:
    """Processes that start in the block take SIGINT as in a terminal; a shell lets its background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Started:
    """A process in a session of its own, so that a signal to its group is what Ctrl-C in a terminal is."""

    def __init__(self, *arguments: str, command: Sequence[str] = (sys.executable, "-m"), **variables: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTER_")}
        with interrupts_not_ignored():
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                start_new_session=True, env={**clean, **variables},
            )  # fmt: skip
        self.output = ""

    def line_with(self, words: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if words in line:
                return line
        raise AssertionError(f"no line with {words!r} in:\n{self.output}")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def until_children(self, *words: str) -> list[psutil.Process]:
        """Return the children once there is one for each of `words`."""
        while True:
            assert self.process.poll() is None
            children = self.children()
            with contextlib.suppress(psutil.Error):
                commands = [" ".join(child.cmdline()) for child in children]
                if all(any(word in command for command in commands) for word in words):
                    return children

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def ended(self) -> int:
        """Return the exit code once it ended; `output` has all it printed."""
        rest, _ = self.process.communicate(timeout=END_S)
        self.output += rest
        return self.process.returncode

    def logged(self, event: str) -> dict[str, Any]:
        lines = [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]
        return next(line for line in lines if line["event"] == event)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return those that run; one that ended may wait for an init process that never reaps it."""
    running = []
    for process in psutil.wait_procs(processes, timeout=1)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


@contextmanager
def started(*arguments: str, command: Sequence[str] = (sys.executable, "-m"), **variables: str) -> Iterator[Started]:
    running = Started(*arguments, command=command, **variables)
    try:
        yield running
    finally:
        children = running.children() if running.process.poll() is None else []
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        running.process.kill()
        running.process.wait()


def test_processes_say_what_they_drain_how_long_at_most_and_when_it_is_over() -> None:
    with started("router", "--port", "0", "--control-port", "0", "--set", "nats.port=0") as router:
        nats_url = router.line_with("event log").split()[2]
        with (
            started("worker_agent", "serve", "--worker-id", "w0", "--nats-url", nats_url) as agent,
            started("indexer", "serve", "--nats-url", nats_url, "--port", "0") as indexer,
        ):
            agent.line_with("worker w0 on")
            indexer.line_with("index on")
            for process, number, counted in (
                (agent, signal.SIGINT, {"requests"}),
                (indexer, signal.SIGTERM, set()),
                (router, signal.SIGINT, {"requests", "connections"}),
            ):
                process.signal(number)
                assert process.ended() == 0, process.output
                assert "Traceback" not in process.output
                began, ended = process.logged("drain_began"), process.logged("drain_ended")
                assert began.keys() - {"event", "level", "timestamp"} == {"at_most_s", *counted}
                assert ended["cut_off"] == []
                assert ended["took_s"] <= began["at_most_s"]


def test_an_agent_that_is_stopped_while_it_waits_for_its_log_ends_as_after_any_stop() -> None:
    with started("worker_agent", "serve", "--nats-url", "nats://127.0.0.1:1") as agent:
        agent.line_with("log_awaited")
        agent.signal(signal.SIGTERM)
        assert agent.ended() == 0
    assert "Traceback" not in agent.output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", [(), ("-m router",), ("nats-server --config",), ("worker-id w0", "worker-id w1")])
def test_a_demo_that_is_interrupted_leaves_neither_a_traceback_nor_a_process(
    phase: tuple[str, ...], number: signal.Signals
) -> None:
    with started("router", "demo", "--workers", "2") as demo:
        demo.line_with("2 simulated workers")
        children = demo.until_children(*phase)
        demo.signal(number)
        code = demo.ended()
        assert code == 1
        assert demo.output.endswith("router demo: stopped before its end; its processes are gone\n")
        assert "Traceback" not in demo.output
        assert not alive(children)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_bench_in_virtual_time_ends_at_once(jobs: int, number: signal.Signals) -> None:
    with started("router", "bench", "placement", "--jobs", str(jobs), "--regimes", "agents") as bench:
        bench.line_with("runs in virtual time")
        children = bench.until_children(*(["spawn_main"] if jobs > 1 else []))
        bench.signal(number)
        bench.ended()
        assert "Traceback" not in bench.output
        assert not alive(children)
