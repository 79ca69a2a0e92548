"""The engine library's logger: internal_error, error, warning, info, verbose, debug; default from TLLM_LOG_LEVEL.

A level that the environment sets wins over `set_level`, which then only warns; an unknown name is a KeyError.
Source: `tensorrt_llm/logger.py` @ 027cd518.
"""

import logging
import os

SEVERITIES = {
    "internal_error": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
    "debug": logging.DEBUG,
}


class Logger:
    """One per process; writes to the standard logger `TRT-LLM`."""

    def __init__(self) -> None:
        level = os.environ.get("TLLM_LOG_LEVEL")
        self._set_from_env = level is not None
        self._min_severity = level.lower() if level is not None and level.lower() in SEVERITIES else "warning"
        self._logger = logging.getLogger("TRT-LLM")
        self._logger.setLevel(SEVERITIES[self._min_severity])

    def set_level(self, min_severity: str) -> None:
        """Write from this level on, unless the environment has set one."""
        if self._set_from_env:
            self.warning(f"Logger level already set from environment. Discard new verbosity: {min_severity}")
            return
        self._logger.setLevel(SEVERITIES[min_severity])
        self._min_severity = min_severity

    def error(self, *msg: object) -> None:
        """Write at level error."""
        self._write(logging.ERROR, msg)

    def warning(self, *msg: object) -> None:
        """Write at level warning."""
        self._write(logging.WARNING, msg)

    def _write(self, level: int, parts: tuple[object, ...]) -> None:
        self._logger.log(level, "[TRT-LLM] %s", " ".join(str(part) for part in parts))


logger = Logger()


def set_level(min_severity: str) -> None:
    """Write from this level on."""
    logger.set_level(min_severity)
