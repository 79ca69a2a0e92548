"""KV that waits for a generation worker, which may be of another process: its engine asks at a port for it.

question  the context request's id in decimal digits; the end of the connection is the answer
"""

import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

_ID_BYTES = 64
_HOST = "127.0.0.1"


class Transfers:
    """What one engine holds for others. `wake` is called when something was taken; `close` ends the thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.taken: deque[Any] = deque()
        self._wake = wake
        self._waiting: dict[int, Any] = {}
        self._server: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="fake-tensorrt-llm", daemon=True)

    def offer(self, request_id: int, held: Any) -> bytes:
        """Hold it; return the port at which it can be taken, in digits."""
        if self._server is None:
            self._server = socket.create_server((_HOST, 0))
            self._thread.start()
        self._waiting[request_id] = held
        return b"%d" % self._server.getsockname()[1]

    def close(self) -> None:
        """Hold nothing any more."""
        if self._server is not None:
            self._server.shutdown(socket.SHUT_RDWR)  # ends `accept`
            self._thread.join()
            self._server.close()

    def _serve(self) -> None:
        assert self._server is not None
        while True:
            try:
                asking, _ = self._server.accept()
            except OSError:
                return
            with asking:
                held = self._waiting.pop(int(asking.recv(_ID_BYTES) or 0), None)
                if held is not None:
                    self.taken.append(held)
                    self._wake()


def take(port: bytes, request_id: int) -> None:
    """Take what is offered there; nothing happens where the process has ended."""
    try:
        with socket.create_connection((_HOST, int(port))) as connection:
            connection.sendall(b"%d" % request_id)
            connection.recv(1)
    except OSError:
        return
