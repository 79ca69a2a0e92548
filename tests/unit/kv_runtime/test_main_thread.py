"""A process whose event loop runs beside its main thread."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from kv_runtime.main_thread import ThreadCall, run_beside

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


def test_a_second_signal_cuts_off_what_runs() -> None:
    async def main(stop: asyncio.Event, _: ThreadCall) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    with pytest.raises(SystemExit) as ended:
        run_beside(main)
    assert ended.value.code == "stopped by a second signal: what was running was cut off"


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
