"""Requests of routers to workers, each over a connection that either may close, or that a cut way leaves hanging.

refused                        no process listens: the worker is dead
no connection in `CONNECT_S`, no first byte in `FIRST_BYTE_S`, no next in `BETWEEN_BYTES_S`    given up
closed by the router           the worker cancels the generation, once it hears of it
reset                          the worker died; the router hears of it, if the way is open
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from tests.simulation.network import Faults, Network
from worker_agent.port.types import EngineOutput, EngineRequest, RequestRefused

CONNECT_S = 1.0
FIRST_BYTE_S = 4.0
BETWEEN_BYTES_S = 3.0

OnOutput = Callable[[EngineOutput], None]


class Server(Protocol):
    """A worker that serves requests."""

    @property
    def worker_id(self) -> str:
        """Its name, and its process's."""

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""

    def serve(self, request: EngineRequest, on_output: OnOutput, on_reset: Callable[[], None]) -> None:
        """Compute; raises `RequestRefused`. It says with `on_reset` that it dies first."""

    def hang_up(self, request_id: str) -> None:
        """No client waits for the request any more."""


class Caller(Protocol):
    """Receives the progress of a call."""

    def on_output(self, output: EngineOutput) -> None:
        """Bytes came."""

    def on_refused(self) -> None:
        """The worker will not compute this request."""

    def on_failure(self, phase: str) -> None:
        """The worker cannot be reached, or said nothing for too long, or its connection was lost; the call is over."""


class Call:
    """One request on its way. `find` returns the process that listens where the worker was registered, if any."""

    def __init__(
        self,
        network: Network,
        router: str,
        worker: str,
        find: Callable[[], Server | None],
        request: EngineRequest,
        caller: Caller,
        delay_max_s: float,
    ) -> None:
        self._timeline, self._find, self._request, self._caller = network.timeline, find, request, caller
        faults = Faults(delay_max_s=delay_max_s)
        self._there = network.way(router, worker, faults, is_connection=True)
        self._back = network.way(worker, router, faults, is_connection=True)
        self._server: Server | None = None
        self._is_over = False
        self._heard = 0
        self._there.send(b"", lambda _: self._connect())
        self._wait(CONNECT_S, "connect")

    def close(self) -> None:
        """The router waits for nothing any more."""
        if not self._is_over:
            self._is_over = True
            self._there.send(b"", lambda _: self._hang_up())

    def _hang_up(self) -> None:
        if self._server is not None and self._server.is_alive:
            self._server.hang_up(self._request.request_id)
        self._server = None

    def _connect(self) -> None:
        server = self._server = self._find()
        if server is None:
            self._answer(partial(self._fail, "connect"))
            return
        self._answer(partial(self._wait, FIRST_BYTE_S, "first_byte"))
        try:
            server.serve(self._request, lambda output: self._answer(partial(self._hear, output)), self._reset)
        except RequestRefused:
            self._answer(self._refuse)

    def _reset(self) -> None:
        self._server = None
        self._answer(partial(self._fail, "reset"))

    def _answer(self, receive: Callable[[], None]) -> None:
        self._back.send(b"", lambda _: None if self._is_over else receive())

    def _hear(self, output: EngineOutput) -> None:
        self._is_over = output.finish_reason is not None
        self._wait(BETWEEN_BYTES_S, "body")
        self._caller.on_output(output)

    def _refuse(self) -> None:
        self._is_over = True
        self._caller.on_refused()

    def _wait(self, patience_s: float, phase: str) -> None:
        """Something was heard: the next thing is waited for so long."""
        self._heard += 1
        if not self._is_over:
            self._timeline.after(patience_s, partial(self._give_up, self._heard, phase))

    def _give_up(self, heard: int, phase: str) -> None:
        if heard == self._heard and not self._is_over:
            self.close()
            self._caller.on_failure(phase)

    def _fail(self, phase: str) -> None:
        self._is_over = True
        self._caller.on_failure(phase)
