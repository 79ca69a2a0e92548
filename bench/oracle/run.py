"""The flips of the peer: its service in a child process, fed with KV events as engines publish them.

    frames  topic, big-endian i64 sequence, msgpack [time, [event, ...], dp_rank]
    event   ["BlockStored", hashes, parent or nil, token ids, block size, LoRA or nil, medium]
    medium  GPU, CPU, DISK

A service takes its weights from the environment when it is made, so each group of cells of equal weights has its own.
Source of the frames: `docs/SOURCES.md` D12; tried on the peer itself.
"""

import json
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq

from bench.oracle.grid import BLOCK_SIZE, Flip, Held, OracleCell, OraclePrompt, Weights
from kv_runtime.process import child_environment

_ROOT = Path(__file__).parents[2]
_MEDIA = ("GPU", "CPU", "DISK")
_SUBSCRIBED_MS = 10_000
_PROMPT_TOKENS = 1 << 16
"""First tokens of prompts are so far apart."""
_encode = msgspec.msgpack.Encoder().encode


class PeerAbsent(Exception):
    """The peer is not available; the message has the reason."""


class PeerFailed(Exception):
    """The peer's process ended, or failed a request."""


class PeerProcess:
    """The process with the peer's service, from the beginning of a `with` statement to its end.

    Raises:
        PeerAbsent: its interpreter is not there, or has no such service.
    """

    def __init__(self, python: str) -> None:
        try:
            self._process = subprocess.Popen(
                [python, "-m", "bench.oracle.peer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**child_environment(), "PYTHONPATH": str(_ROOT)},
            )
        except OSError as error:
            raise PeerAbsent(f"{python}: {error.strerror}") from error
        try:
            first = self._answer()
        except PeerFailed as error:
            raise PeerAbsent(str(error)) from error
        if "absent" in first:
            self.__exit__()
            raise PeerAbsent(first["absent"])
        self.version: str = first["version"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def call(self, **request: Any) -> dict[str, Any]:  # noqa: ANN401 - as the process takes it
        """Return the answer; raise `PeerFailed` where there is none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerFailed(f"the peer's process ended with {self._process.wait()}") from error
        answer = self._answer()
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"the peer's process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class _EventSocket:
    """An engine as the peer sees it: a socket that KV events come from."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._socket = context.socket(zmq.XPUB)
        self._socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._sequence = 0

    def close(self) -> None:
        """Nothing comes from it any more."""
        self._socket.close()

    def store(self, prompts: Iterable[tuple[int, Held]]) -> None:
        """Publish to its subscriber that these prompts (their first tokens) are held so.

        Raises:
            PeerFailed: there is no subscriber.
        """
        if not self._socket.poll(_SUBSCRIBED_MS):
            raise PeerFailed("the peer did not subscribe to KV events")
        self._socket.recv()
        for base, held in prompts:
            if events := list(_stored(base, held)):
                message = _encode([0.0, events, 0])
                self._socket.send_multipart([b"", struct.pack(">q", self._sequence), message])
                self._sequence += 1


def _stored(base: int, held: Held) -> Iterator[list[Any]]:
    at = 0
    for medium, blocks in zip(_MEDIA, held, strict=True):
        if blocks:
            hashes = [base + at + number for number in range(blocks)]
            tokens = list(range(base + at * BLOCK_SIZE, base + (at + blocks) * BLOCK_SIZE))
            yield ["BlockStored", hashes, base + at - 1 if at else None, tokens, BLOCK_SIZE, None, medium]
        at += blocks


def peer_flips(
    process: PeerProcess, cells: Iterable[OracleCell], on_cell: Callable[[OracleCell], None]
) -> dict[str, Flip]:
    """Return the peer's flips by the cells' names.

    Raises:
        PeerFailed: the peer is not available.
    """
    flips: dict[str, Flip] = {}
    for weights, group in groupby(cells, key=lambda cell: cell.weights):
        same = list(group)
        bases = {prompt: _PROMPT_TOKENS * (1 + at) for at, prompt in enumerate(dict.fromkeys(c.prompt for c in same))}
        with ExitStack() as stack:
            _serve(process, weights, bases, stack)
            for cell in same:
                flip = process.call(flip=[cell.prompt, cell.load], base=bases[cell.prompt])
                flips[cell.name] = Flip(**flip)
                on_cell(cell)
    return flips


def _serve(process: PeerProcess, weights: Weights, bases: dict[OraclePrompt, int], stack: ExitStack) -> None:
    context = stack.enter_context(zmq.Context())
    first, second = (stack.enter_context(closing(_EventSocket(context))) for _ in range(2))
    process.call(serve=weights.environment, events=[first.endpoint, second.endpoint])
    first.store((base, prompt.first) for prompt, base in bases.items())
    second.store((base, prompt.second) for prompt, base in bases.items())
    process.call(**{"await": [[base, prompt] for prompt, base in bases.items()]})
