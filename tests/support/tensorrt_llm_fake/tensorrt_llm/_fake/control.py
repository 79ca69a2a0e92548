"""What a test asks of the fake beyond the real one's interface: facts of the machine and the model, and faults.

| ask | effect |
|---|---|
| `gpus` | GPUs of this node |
| `model` | size, formula and speed of the model (`ModelFacts`) |
| `start_failure = error` | building an engine raises it |
| `delay_start()`, `finish_start()` | building an engine blocks its thread from one to the other |
| `hold()`, `allow(n)`, `release()` | no iteration; n more; as many as there is work for |
| `kill(error)` | the executor dies: fatal error, pending requests fail, new ones are refused |
| `refuse_request(text)`, `fail_request(text)` | the next request: RequestError at submission, or while iterating |
| `fail_polls("kv_events" or "stats", error, times)` | the next polling calls raise |
| `main_thread_only = True` | building or ending an engine on another thread is an error, as MPI has it |
| `heard` | of each request so far: its trace headers, and its conversation |
| `results` | of each request so far that is still referred to: its result |
| `llms` | the `LLM` objects that are still referred to, in the order of their making |
| `version` | the version that the engine behaves as, where versions differ (`docs/TENSORRT_LLM.md`, "Versions") |

Processes that a test starts are told by the variable `TENSORRT_LLM_FAKE`: a JSON map of `gpus`, `start_failure`
(a text), `main_thread_only`, `version`, and of `model` with fields of `ModelFacts`.
"""

# ruff: noqa: TID252  by its own name mypy would look for the real package

import json
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from ..version import __version__

VARIABLE = "TENSORRT_LLM_FAKE"
RESULTS_MAX = 100
"""Results that a test may look at."""
Poll = Literal["kv_events", "stats"]


class Executor(Protocol):
    """What the control reaches of an engine."""

    def _set_fatal_error(self, error: BaseException) -> None: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class ModelFacts:
    """A model, in tokens, blocks and milliseconds.

    A model with an `image_token_id` takes prompts with media as tokens; another one turns them into text first.
    """

    vocab_size: int = 32_000
    max_seq_len: int = 8_192
    gpu_blocks: int = 1_000
    bytes_per_block: int = 1 << 20
    tokens_per_item: int = 8
    iteration_ms: float = 10.0
    image_token_id: int | None = None
    embedding_dtype: str = "torch.float16"

    def seq_len_of(self, asked: int | None) -> int:
        """Return the longest sequence: the model's, or what the argument asks for, if that is shorter."""
        return self.max_seq_len if asked is None else min(asked, self.max_seq_len)


class Control:
    """The only one is `control`. Its methods may be called from any thread, at any time."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Guards what was asked for, and wakes the engines."""
        self._executors: weakref.WeakSet[Any] = weakref.WeakSet()
        self.reset()

    def reset(self) -> None:
        """Forget all that was asked; read the environment's variable again."""
        with self.changed:
            told = json.loads(os.environ.get(VARIABLE, "{}"))
            self.model = replace(ModelFacts(), **told.get("model", {}))
            self.gpus = int(told.get("gpus", 8))
            failure = told.get("start_failure")
            self.start_failure: Exception | None = None if failure is None else RuntimeError(failure)
            self.main_thread_only = bool(told.get("main_thread_only", False))
            self.version = str(told.get("version", __version__))
            self._allowed: int | None = None
            self._start_delayed = False
            self._refusals: list[str] = []
            self._failures: list[str] = []
            self._poll_errors: dict[str, list[Exception]] = {"kv_events": [], "stats": []}
            self._tensors: dict[str, int] = {}
            self._llms: list[weakref.ref[Any]] = []
            self._results: deque[weakref.ref[Any]] = deque(maxlen=RESULTS_MAX)
            self.heard: list[tuple[dict[str, str], str | None]] = []
            self.changed.notify_all()

    def is_before(self, candidate: int) -> bool:
        """Return whether `version` is a release candidate of 1.3.0 below this number."""
        name, _, number = self.version.partition("1.3.0rc")
        return not name and int(number.partition(".")[0]) < candidate

    # ---------------------------------------------------------------------------------- asked by tests
    @property
    def executors(self) -> list[Any]:
        """Return the executors that are not shut down."""
        return [each for each in self._executors if not each.doing_shutdown]

    @property
    def results(self) -> list[Any]:
        """Return the newest requests' results."""
        return [result for each in self._results if (result := each()) is not None]

    @property
    def llms(self) -> list[Any]:
        """Return the `LLM` objects."""
        return [llm for each in self._llms if (llm := each()) is not None]

    def delay_start(self) -> None:
        """From now on building an engine blocks."""
        with self.changed:
            self._start_delayed = True

    def finish_start(self) -> None:
        """Engines that are being built go on."""
        with self.changed:
            self._start_delayed = False
            self.changed.notify_all()

    def hold(self) -> None:
        """No further iteration begins."""
        with self.changed:
            self._allowed = 0

    def allow(self, iterations: int) -> None:
        """So many more iterations may begin, of all engines together."""
        with self.changed:
            self._allowed = (self._allowed or 0) + iterations
            self.changed.notify_all()

    def release(self) -> None:
        """Iterations begin whenever there is work."""
        with self.changed:
            self._allowed = None
            self.changed.notify_all()

    def kill(self, error: BaseException | None = None, among: Collection[Any] | None = None) -> None:
        """Every executor has had a fatal error, or every one of these."""
        for each in self.executors if among is None else among:
            each._set_fatal_error(error or RuntimeError("CUDA error: an illegal memory access was encountered"))

    def refuse_request(self, message: str) -> None:
        """Refuse the next request when it is submitted."""
        self._refusals.append(message)

    def fail_request(self, message: str) -> None:
        """Fail the next request in its first iteration."""
        self._failures.append(message)

    def fail_polls(self, poll: Poll, error: Exception, times: int = 1) -> None:
        """Fail the next polling calls of this kind."""
        self._poll_errors[poll] += [error] * times

    # ------------------------------------------------------------------------------- asked by the fake
    def await_start(self) -> None:
        """Return when engines may start.

        Raises:
            Exception: `start_failure`.
        """
        with self.changed:
            self.changed.wait_for(lambda: not self._start_delayed)
            if self.start_failure is not None:
                raise self.start_failure

    def check_thread(self) -> None:
        """Raise where an engine is built or ended on another thread than the main one, and that is not allowed."""
        if self.main_thread_only and threading.current_thread() is not threading.main_thread():
            raise RuntimeError(f"MPI belongs to the main thread, not to {threading.current_thread().name}")

    def know(self, executor: Executor) -> None:
        """Reach this executor from now on."""
        self._executors.add(executor)

    def built(self, llm: object) -> None:
        """Tell of this object from now on."""
        self._llms.append(weakref.ref(llm))

    def answers(self, result: object) -> None:
        """Tell of this request's result from now on."""
        self._results.append(weakref.ref(result))

    def may_iterate(self, ready: Callable[[], bool], ended: Callable[[], bool]) -> bool:
        """Return True when there is work and another iteration may begin, False when `ended` comes first."""
        with self.changed:
            self.changed.wait_for(lambda: ended() or (ready() and self._allowed != 0))
            if ended():
                return False
            if self._allowed is not None:
                self._allowed -= 1
            return True

    def woken(self) -> None:
        """Let all engines look again whether an iteration may begin."""
        with self.changed:
            self.changed.notify_all()

    def next_refusal(self) -> str | None:
        """Return what the request now submitted is refused with."""
        return self._refusals.pop(0) if self._refusals else None

    def next_failure(self) -> str | None:
        """Return what the request now admitted fails with."""
        return self._failures.pop(0) if self._failures else None

    def check_poll(self, poll: Poll) -> None:
        """Raise what was asked for this call."""
        if self._poll_errors[poll]:
            raise self._poll_errors[poll].pop(0)

    def share_tensor(self, digest: str) -> str:
        """Return the name of a new shared tensor; the digest is part of it."""
        with self.changed:
            self._tensors[digest] = self._tensors.get(digest, 0) + 1
            return digest

    def take_tensor(self, name: str) -> None:
        """Spend a shared tensor.

        Raises:
            RuntimeError: there is none of that name, or it has been taken.
        """
        with self.changed:
            if not self._tensors.get(name):
                raise RuntimeError("REBUILD_LOCAL tensor missing")
            self._tensors[name] -= 1


control = Control()
