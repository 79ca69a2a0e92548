"""The engines that can be attached, each in a file of its own: to add one, write its file and name its class here."""

from collections.abc import Mapping

from worker_agent.engines.servers.base import EngineServer
from worker_agent.engines.servers.sglang import Sglang
from worker_agent.engines.servers.trtllm_serve import TrtllmServe
from worker_agent.engines.servers.vllm import Vllm

SERVERS: Mapping[str, EngineServer] = {each.name: each for each in (Vllm(), Sglang(), TrtllmServe())}
"""By name."""
ASSUMED = Vllm.name
"""The kind of an engine without an address, which cannot be asked."""
