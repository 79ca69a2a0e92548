"""`indexer check-capture`: a recording of a real engine, played through the whole pipe."""

import sys
from pathlib import Path

import click

from bench.capture.capture import CaptureUnreadable, load_capture
from bench.capture.check import print_check
from bench.capture.pipe import CheckFailed
from kv_runtime.event_log import BrokerUnavailable, StreamUnfit
from kv_runtime.nats_server import NatsServerError
from kv_runtime.process import run_process
from kv_runtime.telemetry import configure_logs

_EXPECTED = (BrokerUnavailable, CheckFailed, NatsServerError, StreamUnfit)


@click.command("check-capture")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="print the figures as one JSON object")
@click.option("--chaos", type=click.IntRange(0, (1 << 64) - 1), metavar="SEED", help="drop, double, reorder frames")
def check_capture(file: Path, as_json: bool, chaos: int | None) -> None:
    """Play a recording of a real engine's KV events; compare predictions with what the engine reused.

    FILE is a capture: msgpack, plain or gzip, with block_size, frames and requests. Every frame goes the real way: a
    ZeroMQ publisher, the consolidator, a nats-server of this command's own, the index. Before each round of requests
    the index has applied what was published up to the end of the round before, and nothing later.

    \b
    exact            requests for which the index predicted as many cached prompt tokens as the
                     engine reused (the last token of a prompt is always computed)
    explained        exact requests, and requests for which prediction and reuse are equal, block by
                     block, at some moment of their own round
    under, over      requests that are not exact: fewer or more tokens were predicted
    missing_parent   stored blocks with an unknown parent
    duplicate        stored blocks that were held already
    unknown_removal  removed blocks that were not held

    --chaos drops, doubles or reorders a fifth of the frames on the live socket; replay is there, so that the figures
    must be the same. The exit code is 0 when the capture was read through, whatever the figures; 2 when FILE is no
    capture; 1 for other trouble.
    """  # noqa: D301  (click reads the character, not its name)
    configure_logs("warning")
    try:
        capture = load_capture(file)
        run_process(lambda stop: print_check(capture, file.name, stop, as_json=as_json, chaos_seed=chaos))
    except CaptureUnreadable as error:
        print(f"indexer: {error}", file=sys.stderr)
        sys.exit(2)
    except _EXPECTED as error:
        sys.exit(f"indexer: {error}")
