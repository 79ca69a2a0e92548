"""vLLM's OpenAI server. Source: `worker_agent/engines/servers/vllm.py`."""

from typing import Any, ClassVar

from aiohttp import web

from tests.system.integration.double_contexts import first_answer
from tests.system.integration.engine_doubles.base import PrometheusDouble
from worker_agent.engines.servers.base import EngineFacts


class VllmDouble(PrometheusDouble):
    """vLLM's OpenAI server, 0.33. `adapters` are LoRA names."""

    facts: ClassVar = EngineFacts(
        kind="vllm",
        version="0.33.0",
        directory="m",
        served_names=("m",),
        api_endpoints=("chat", "completions"),
        publish_endpoint="tcp://*:5557",
        dp_ranks=1,
        block_size=16,
        total_kv_blocks=1000,
        max_seq_len=4096,
    )
    states_version: ClassVar = True
    adapters: tuple[str, ...] = ()
    publishes_at: tuple[str, ...] = ()
    """The addresses that its ranks bound; empty: those of its default configuration."""

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.get("/kv_event_sources", self._event_sources, allow_head=False)]

    async def _event_sources(self, _: web.Request) -> web.Response:
        said = {"enable_kv_cache_events": True, "publisher": "zmq", "replay_endpoint": None, "topic": ""}
        bound = self.publishes_at or [f"tcp://*:{5557 + rank}" for rank in range(len(self.ranks))]
        return web.json_response({str(rank): said | {"endpoint": at} for rank, at in enumerate(bound)})

    def cards(self) -> list[dict[str, Any]]:
        base = {"object": "model", "created": 1, "owned_by": "vllm", "root": self.model, "permission": []}
        served = {**base, "id": self.model, "parent": None, "max_model_len": self.max_model_len}
        return [served, *({**base, "id": name, "parent": self.model, "max_model_len": None} for name in self.adapters)]

    def phase_answer(self, path: str, body: dict[str, Any]) -> web.Response | None:
        """The NIXL connector's words: `do_remote_decode` asks a prefill server, its answer is a decode server's."""
        params = body.get("kv_transfer_params") or {}
        if not self.contexts.enabled or not (params.get("do_remote_decode") or params.get("do_remote_prefill")):
            return None
        if params.get("do_remote_prefill"):
            (name,) = params["remote_block_ids"]
            if self.contexts.held.pop(name, None) != params["remote_engine_id"]:
                self.surprises.append(f"blocks {name} of {params['remote_engine_id']}")
            return None
        if body.get("stream") or body.get("max_tokens") != 1:
            self.surprises.append(f"a prefill with stream {body.get('stream')}, max_tokens {body.get('max_tokens')}")
        answer = first_answer(path, body, self.contexts)
        said = None if self.contexts.ends_at_once else self._blocks_said()
        return web.json_response(answer | {"kv_transfer_params": said})

    def _blocks_said(self) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [self.contexts.hold(None, self.url)],
            "remote_engine_id": self.url,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
        }

    def metrics_text(self) -> str:
        lines = ["# HELP vllm:num_requests_running Number of requests in model execution batches."]
        for rank, load in enumerate(self.ranks):
            labels = f'engine="{rank}",model_name="{self.model}"'
            lines += [
                f"vllm:num_requests_running{{{labels}}} {float(load.running)}",
                f"vllm:num_requests_waiting{{{labels}}} {float(load.waiting)}",
                f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 9.0',
                f"vllm:kv_cache_usage_perc{{{labels}}} {load.used_blocks / self.total_blocks}",
                f"vllm:cache_config_info{{{self._cache_config(rank)}}} 1.0",
            ]
        return "\n".join([*lines, ""])

    def _cache_config(self, rank: int) -> str:
        said = {
            "block_size": self.block_size,
            "engine": rank,
            "num_gpu_blocks": self.total_blocks,
            "cache_dtype": "auto",
        }
        return ",".join(f'{name}="{value}"' for name, value in said.items())
