"""SGLang's HTTP server. Source: `worker_agent/engines/servers/sglang.py`."""

from typing import Any, ClassVar

from aiohttp import web

from tests.system.integration.engine_doubles.base import PrometheusDouble
from worker_agent.engines.servers.base import EngineFacts


class SglangDouble(PrometheusDouble):
    """SGLang's HTTP server, started with `--enable-metrics`. An old one has `/get_server_info` alone."""

    facts: ClassVar = EngineFacts(
        kind="sglang",
        version="0.5.9",
        directory="m",
        served_names=("m",),
        api_endpoints=("chat", "completions"),
        publish_endpoint="none",
        dp_ranks=1,
        block_size=16,
        total_kv_blocks=1000,
        max_num_seqs=48,
        max_num_batched_tokens=8192,
        max_seq_len=4096,
    )
    is_old: bool = False
    kv_events_config: str | None = None
    """`--kv-events-config` as it was given."""

    def routes(self) -> list[web.RouteDef]:
        paths = ["/get_server_info"] if self.is_old else ["/get_server_info", "/server_info"]
        return [*super().routes(), *(web.get(path, self._server_info, allow_head=False) for path in paths)]

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self.model,
                "page_size": self.block_size,
                "context_length": None,
                "max_running_requests": 48,
                "chunked_prefill_size": 8192,
                "max_prefill_tokens": 16384,
                "dp_size": len(self.ranks),
                "status": "ready",
                "max_total_num_tokens": self.total_blocks * self.block_size,
                "max_req_input_len": self.max_model_len - 6,
                "internal_states": [{} for _ in self.ranks],
                "version": "0.5.9",
                "tokenizer_path": self.model,
                "kv_events_config": self.kv_events_config,
            }
        )

    def cards(self) -> list[dict[str, Any]]:
        named = {"id": self.model, "object": "model", "created": 1, "owned_by": "sglang", "root": self.model}
        return [named | {"parent": None, "max_model_len": self.max_model_len}]

    def refusal(self, body: dict[str, Any]) -> web.Response | None:
        if "messages" in body and body.get("stream") and body.get("return_token_ids"):
            return self.failed(400, "return_token_ids is not supported for streaming")
        return super().refusal(body)

    def metrics_text(self) -> str:
        lines = ["# TYPE sglang:num_running_reqs gauge"]
        for rank, load in enumerate(self.ranks):
            for tp_rank in (0, 1):  # of one rank, telling the same
                labels = f'dp_rank="{rank}",engine_type="unified",model_name="{self.model}",tp_rank="{tp_rank}"'
                lines += [
                    f"sglang:num_running_reqs{{{labels}}} {float(load.running)}",
                    f"sglang:num_queue_reqs{{{labels}}} {float(load.waiting)}",
                    f"sglang:num_used_tokens{{{labels}}} {float(load.used_blocks * self.block_size)}",
                    f"sglang:max_total_num_tokens{{{labels}}} {float(self.total_blocks * self.block_size)}",
                    f"sglang:token_usage{{{labels}}} {load.used_blocks / self.total_blocks}",
                ]
        return "\n".join([*lines, ""])
