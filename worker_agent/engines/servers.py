"""The engines that can be attached, by name."""

from collections.abc import Mapping

from worker_agent.engines.server import EngineServer
from worker_agent.engines.sglang import Sglang
from worker_agent.engines.trtllm_serve import TrtllmServe
from worker_agent.engines.vllm import Vllm

SERVERS: Mapping[str, EngineServer] = {each.name: each for each in (Vllm(), Sglang(), TrtllmServe())}
ASSUMED = Vllm.name
"""The engine without an address, which can say nothing of itself."""
