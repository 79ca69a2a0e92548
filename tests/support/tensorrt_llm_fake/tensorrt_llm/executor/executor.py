"""The executor: what `LLM` drives, and what a health check may look into.

    thread        one, named `fake-tensorrt-llm`; it sleeps while there is no work, and ends with `shutdown` or a fatal
                  error
    fatal error   the first one is kept in `_fatal_error`; all pending results raise EngineDeadError of it, and so does
                  every later submission; `check_health()` is False, `is_shutdown()` True
    shutdown      may be repeated; pending results fail with RequestError
    polling       `get_kv_events`, `get_stats` take all there is, as maps. The `a`-forms ask at once, in the caller's
                  thread, and then yield one map at a time. A call with a timeout sleeps 100 ms after each empty fetch

Source: `executor/executor.py` @ ed53795b, `executor/rpc_proxy.py` (polling, stored text 4324933957),
`executor/rpc_worker_mixin.py` @ 0657386b (100 ms), PR #12718 and the RPC executor's own test (fatal errors);
`SURFACE.md`.
"""

# ruff: noqa: TID252  by its own name mypy would look for the real package

import threading
import time
from collections.abc import Callable
from typing import Any

from .._fake.control import control
from .._fake.engine import Engine
from .._fake.requests import Request
from ..logger import logger
from .request import LoRARequest
from .result import GenerationResult
from .utils import EngineDeadError, RequestError

THREAD = "fake-tensorrt-llm"
RPC_PAUSE_S = 0.1
"""Between two empty fetches of one call with a timeout."""

__all__ = ["GenerationExecutor", "LoRARequest"]


class GenerationExecutor:
    """Computes requests. `args` are those of `LLM`; building it blocks until the engine is up."""

    def __init__(self, args: Any, *, encoder_only: bool = False) -> None:
        control.check_thread()
        self.doing_shutdown = False
        self._fatal_error: BaseException | None = None
        self._last_client_id = 1
        self._lock = threading.RLock()
        self._told = threading.Condition(self._lock)
        self._results: dict[int, tuple[Request, GenerationResult]] = {}
        self._is_dirty, self._has_progress = False, True
        self.engine = Engine(args, self._wake, encoder_only=encoder_only)
        control.await_start()
        self._thread = threading.Thread(target=self._loop, name=THREAD, daemon=True)
        self._thread.start()
        control.know(self)

    # ------------------------------------------------------------------------------------------ requests
    def submit(self, build: Callable[[int], tuple[Request, GenerationResult]]) -> GenerationResult:
        """Return the result of a new request, which `build` makes for its id.

        Raises:
            EngineDeadError: the engine is dead.
            RequestError: the request is refused.
        """
        with self._lock:
            if self._fatal_error is not None:
                raise EngineDeadError(self._fatal_error)
            refusal = control.next_refusal()
            if refusal is not None:
                raise RequestError(refusal)
            self._last_client_id = (self._last_client_id + 1) & (2**64 - 1)
            request, result = build(self._last_client_id)
            self._results[request.request_id] = (request, result)
            self.engine.waiting.append(request)
            self._wake()
        return result

    def abort_request(self, request_id: int) -> None:
        """Cancel a request; ids that are not computed are ignored."""
        with self._lock:
            found = self._results.get(request_id)
            if found is not None:
                found[0].is_cancelled = True
        self._wake()

    # ------------------------------------------------------------------------------------------- polling
    def get_stats(self, timeout: float | None) -> list[dict[str, Any]]:
        """Return all rows since the last call."""
        return self._fetch("stats", timeout)

    def get_kv_events(self, timeout: float | None) -> list[dict[str, Any]]:
        """Return all events since the last call."""
        return self._fetch("kv_events", timeout)

    def get_kv_cache_capacity(self) -> dict[str, Any]:
        """Return the GPU pool's size."""
        return self.engine.capacity()

    # ---------------------------------------------------------------------------------------------- life
    def check_health(self) -> bool:
        """Return whether the engine computes."""
        return not self.doing_shutdown and self._fatal_error is None

    def is_shutdown(self) -> bool:
        """Return whether the engine has ended, by `shutdown` or of an error."""
        return self.doing_shutdown or self._fatal_error is not None

    def shutdown(self) -> None:
        """End the engine's thread; return when it has ended."""
        control.check_thread()
        self.doing_shutdown = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._fail_pending(RequestError("the executor was shut down"))
        with self._lock:
            self._told.notify_all()

    def _abandon(self) -> None:
        """End the engine's thread without waiting for it.

        The garbage collector calls this on any thread, also on one that holds a lock of the fake's own, which the
        engine's thread needs to end.
        """
        self.doing_shutdown = True
        self._wake()

    def _set_fatal_error(self, error: BaseException) -> None:
        with self._lock:
            if self._fatal_error is None:
                self._fatal_error = error
                logger.error(f"Fatal error in the executor: {error!r}")
            self._told.notify_all()
        self._fail_pending(EngineDeadError(self._fatal_error))
        self._wake()

    def _is_ready(self) -> bool:
        return self.engine.has_work and (self._has_progress or self._is_dirty)

    def _loop(self) -> None:
        while control.may_iterate(self._is_ready, self.is_shutdown):
            with self._lock:
                self._is_dirty = False
                try:
                    self._has_progress = self.engine.iterate()
                except Exception as error:  # noqa: BLE001  a processor's error is the engine's, as in the real one
                    self._set_fatal_error(error)
                self._told.notify_all()
        self.engine.transfers.close()

    def _wake(self) -> None:
        self._is_dirty = True
        control.woken()

    def _fail_pending(self, error: BaseException) -> None:
        with self._lock:
            pending = [result for _, result in self._results.values()]
            self._results.clear()
        for result in pending:
            result.put(error)

    def answered(self, request_id: int) -> None:
        """Forget a request: its last response is on its way."""
        self._results.pop(request_id, None)

    def _fetch(self, poll: Any, timeout: float | None) -> list[dict[str, Any]]:
        end = time.monotonic() + (timeout or 0)
        while not (found := self._fetch_rpc(poll)) and time.monotonic() < end and not self.is_shutdown():
            time.sleep(RPC_PAUSE_S)
        return found

    def _fetch_rpc(self, poll: Any) -> list[dict[str, Any]]:
        control.check_poll(poll)
        with self._lock:
            return self._drain(poll)

    def _drain(self, poll: str) -> list[dict[str, Any]]:
        if poll == "kv_events":
            return self.engine.drain_events()
        drained = list(self.engine.statistics)
        self.engine.statistics.clear()
        return drained
