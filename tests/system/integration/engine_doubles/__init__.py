"""HTTP doubles of engines that run elsewhere: what `worker-agent attach` speaks to, built from public sources.

They are strict: a path that the real server does not have is 404, another method 405, and both stand in `surprises`,
which a test finds empty at the end. What is read once is gone, as it is there.

Each engine of `SERVERS` has its double here, in a file of its own (`base.py` says how to write one). Tests of all
engines go through `DOUBLES`.
"""

from importlib import import_module
from pkgutil import iter_modules

from tests.system.integration.engine_doubles.base import (
    CHUNKS,
    EngineDouble,
    Fault,
    PrometheusDouble,
    Rank,
)
from tests.system.integration.engine_doubles.sglang import SglangDouble
from tests.system.integration.engine_doubles.trtllm_serve import TrtllmServeDouble
from tests.system.integration.engine_doubles.vllm import VllmDouble

__all__ = [
    "CHUNKS",
    "DOUBLES",
    "EngineDouble",
    "Fault",
    "PrometheusDouble",
    "Rank",
    "SglangDouble",
    "TrtllmServeDouble",
    "VllmDouble",
]

_FILES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
DOUBLES: dict[str, type[EngineDouble]] = {
    found.facts.kind: found
    for file in _FILES
    for found in vars(file).values()
    if isinstance(found, type) and issubclass(found, EngineDouble) and "facts" in vars(found)
}
"""By the engine's name in `SERVERS`."""
