"""The engines that can be attached, each in a file of its own here: to add an engine, write its file."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from worker_agent.engines.servers.base import EngineServer

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
SERVERS: Mapping[str, EngineServer] = {each.name: each() for each in EngineServer.__subclasses__()}
"""The engines by name."""
ASSUMED = "vllm"
"""The kind that is assumed for an engine without an address, which cannot be asked."""
