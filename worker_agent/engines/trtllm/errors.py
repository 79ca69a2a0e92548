"""Classifies errors of TensorRT-LLM while the engine lives.

    error                                            raised               means
    ----------------------------------------------   ------------------   ----------------------------------------------
    AttributeError, TypeError, ImportError           at any time          `LibraryMismatch`: this version lacks a name,
                                                                          or takes other arguments than the agent gives.
                                                                          500 for the client, one log line a message
    any other                                        at submission        `RequestRefused`: a value of the request, or
                                                                          what it names
    `RequestError`, a handoff that cannot be read    after submission     `RequestRefused`
    any other                                        after submission     the engine is dead

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/executor/utils.py` (`RequestError`), `tensorrt_llm/llmapi/llm.py`
(`_check_arguments` raises ValueError).
"""

import structlog

from kv_protocol.errors import shortened
from worker_agent.port.handoff import HandoffInvalid
from worker_agent.port.types import EngineError, RequestRefused

_MISMATCHES = (AttributeError, TypeError, ImportError)
_LOGGED_MAX = 64
"""Most different messages that are logged, each once."""
_CHARACTERS_MAX = 300
"""Of a message: the missing name stands at its end."""

_log = structlog.get_logger("trtllm")


class LibraryMismatch(EngineError):
    """The installed TensorRT-LLM does not fit the agent's calls: the agent's fault, not the client's."""


class LibraryErrors:
    """Errors of one installed `version`; `request_error` is its class of errors that are one request's."""

    def __init__(self, version: str, request_error: type[Exception]) -> None:
        self._version, self._of_requests = version, (request_error, HandoffInvalid)
        self._logged: set[str] = set()

    def meaning(self, error: Exception, *, is_new: bool) -> EngineError | None:
        """Return the request's error; None: the engine is dead. `is_new`: the request was just submitted."""
        if isinstance(error, _MISMATCHES):
            return self._mismatch(error)
        if is_new or isinstance(error, self._of_requests):
            return RequestRefused("request", str(error), "what the engine can serve")
        return None

    def _mismatch(self, error: Exception) -> LibraryMismatch:
        found = shortened(f"{type(error).__name__}: {error}", _CHARACTERS_MAX)
        if found not in self._logged and len(self._logged) < _LOGGED_MAX:
            self._logged.add(found)
            _log.error("library_mismatch", version=self._version, reason=found, exc_info=error)
        return LibraryMismatch(f"tensorrt_llm {self._version} does not have what the agent asks for: {found}")
