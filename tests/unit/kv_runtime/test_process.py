"""A process: its signals, its garbage, its last line, its main thread, and the files that it replaces."""

import asyncio
import gc
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kv_runtime.files import replace_file
from kv_runtime.main_thread import ThreadCall, run_beside
from kv_runtime.process import print_json, print_lines, run_process, signals_set
from kv_runtime.supervise import Part, run_parts


@pytest.mark.parametrize("is_error", [False, True])
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("w0", "w0"),
        ("Größe 模型 [b]", "Größe 模型 [b]"),
        ("\x1b[2J", r"\x1b[2J"),
        ("w0\nw1", r"w0\nw1"),
        ("\r\t\x7f", r"\r\t\x7f"),
        ("\x9b2J", r"\x9b2J"),
        ("\u202e\u2028", r"\u202e\u2028"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_a_terminal_would_obey_is_printed_escaped(
    capsys: pytest.CaptureFixture[str], name: str, shown: str, is_error: bool
) -> None:
    print_lines(f"rank {name}/0", "", err=is_error)
    printed = capsys.readouterr()
    assert (printed.out, printed.err)[is_error] == f"rank {shown}/0\n\n"


def test_json_is_printed_in_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    print_json('{"a":"\u009b2J\u202e模","n":18446744073709551615,"f":1.5}'.encode())
    assert capsys.readouterr().out == '{"a":"\\u009b2J\\u202e\\u6a21","n":18446744073709551615,"f":1.5}\n'


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_sets_stop(number: signal.Signals) -> None:
    stop = asyncio.Event()
    with signals_set(stop):
        signal.raise_signal(number)
        await stop.wait()


async def test_a_second_signal_cancels_the_caller_and_gives_the_signals_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = asyncio.Event()

    async def main() -> None:
        with signals_set(stop):
            signal.raise_signal(signal.SIGTERM)
            await stop.wait()
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        running = group.create_task(main())
    assert (running.cancelled(), signal.getsignal(signal.SIGTERM)) == (True, before)


@pytest.mark.parametrize("run", [run_process, run_beside])
def test_a_process_collects_garbage_rarely(run: Any) -> None:
    async def looks(*_: object) -> None:
        seen.append(gc.get_threshold()[0])

    before, seen = gc.get_threshold(), list[int]()
    gc.set_threshold(700)
    try:
        run(looks)
    finally:
        gc.set_threshold(*before)
    assert seen == [20_000]


@pytest.mark.parametrize("run", [run_process, run_beside])
def test_a_process_that_is_told_twice_to_stop_ends_with_a_line_and_no_traceback(run: Any) -> None:
    async def stays(stop: asyncio.Event, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    with pytest.raises(SystemExit) as ended:
        run(stays)
    assert ended.value.code == "stopped by a second signal: what was running was cut off"


def test_a_process_that_cannot_drain_in_time_ends_with_a_line_and_no_traceback() -> None:
    async def stays(_: asyncio.Event) -> None:
        await asyncio.Event().wait()

    async def drains(stop: asyncio.Event) -> None:
        stop.set()
        await run_parts([Part("stuck", stays)], stop=stop, drain_s=0.0)

    with pytest.raises(SystemExit) as ended:
        run_process(drains)
    assert ended.value.code == "cancelled after 0.0 s of draining: stuck"


WAIT_S = 30.0

STUCK = """
import asyncio, os, signal, threading
from kv_runtime.main_thread import run_beside

async def main(stop, call):
    waiting = asyncio.ensure_future(call(threading.Event().wait))
    await asyncio.sleep(0)
    print("begun", flush=True)
    await waiting

run_beside(main)
"""


def on_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def test_functions_run_on_the_main_thread_while_the_loop_goes_on() -> None:
    told: list[object] = []

    async def main(_: asyncio.Event, call: ThreadCall) -> None:
        turned = threading.Event()

        def waits() -> bool:
            assert turned.wait(WAIT_S)
            return on_main()

        waiting = asyncio.ensure_future(call(waits))
        await asyncio.sleep(0)
        told.append(on_main())
        turned.set()
        told.append(await waiting)

    run_beside(main)
    assert told == [False, True]


def test_what_a_function_raises_comes_to_its_caller_and_what_main_raises_to_the_process() -> None:
    def broken() -> None:
        raise OSError("no MPI")

    async def main(_: asyncio.Event, call: ThreadCall) -> None:
        with pytest.raises(OSError, match="no MPI"):
            await call(broken)
        raise LookupError("the end")

    with pytest.raises(LookupError, match="the end"):
        run_beside(main)


def test_a_call_that_was_cancelled_before_its_turn_is_not_made() -> None:
    made: list[str] = []

    async def main(_: asyncio.Event, call: ThreadCall) -> None:
        turn = threading.Event()
        first = asyncio.ensure_future(call(turn.wait))
        second = asyncio.ensure_future(call(lambda: made.append("second")))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        turn.set()
        await first
        await call(lambda: made.append("third"))

    run_beside(main)
    assert made == ["third"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_heard_while_the_main_thread_is_in_a_call(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    heard: list[bool] = []

    async def main(stop: asyncio.Event, call: ThreadCall) -> None:
        over = threading.Event()
        waiting = asyncio.ensure_future(call(lambda: over.wait(WAIT_S)))
        await asyncio.sleep(0)
        os.kill(os.getpid(), number)
        await stop.wait()
        over.set()
        heard.append(await waiting)

    run_beside(main)
    assert heard == [True]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_main_thread_that_does_not_return_is_cut_off_by_a_later_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        ends = _signalled_until_it_ends(process.poll, lambda: process.send_signal(signal.SIGTERM))
        assert process.stderr is not None
        assert (ends, process.stderr.read()) == (1, b"stopped by another signal: the main thread was cut off\n")


def _signalled_until_it_ends(poll: Callable[[], int | None], send: Callable[[], None]) -> int | None:
    """Return the exit code; signals that come together count as one, so there are as many as it takes."""
    pause = threading.Event()
    for _ in range(300):
        if (code := poll()) is not None:
            return code
        send()
        pause.wait(0.1)
    return None


@pytest.mark.parametrize("left", ["state.new", "state.json", "other"], ids=["half written", "present", "none"])
def test_only_its_user_reads_a_file_whatever_was_there_before(tmp_path: Path, left: str) -> None:
    before, path = tmp_path / left, tmp_path / "state.json"
    before.write_text("before")
    before.chmod(0o644)
    replace_file(path, b"now")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"now", 0o600)
    assert not (tmp_path / "state.new").exists()
