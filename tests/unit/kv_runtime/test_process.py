"""A process: its signals, its garbage, and the line with which it ends when it is cut off."""

import asyncio
import gc
import signal
from typing import Any

import pytest

from kv_runtime.main_thread import run_beside
from kv_runtime.process import install_signals, print_json, print_lines, run_process
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
    undo = install_signals(stop)
    try:
        signal.raise_signal(number)
        await stop.wait()
    finally:
        undo()


async def test_a_second_signal_cancels_the_caller_and_gives_the_signals_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = asyncio.Event()

    async def main() -> None:
        install_signals(stop)
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


def test_a_process_that_is_told_twice_to_stop_ends_with_a_line_and_no_traceback() -> None:
    async def stays(stop: asyncio.Event) -> None:
        signal.raise_signal(signal.SIGTERM)
        await stop.wait()
        signal.raise_signal(signal.SIGTERM)
        await asyncio.Event().wait()

    with pytest.raises(SystemExit) as ended:
        run_process(stays)
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
