"""Routers and workers of model directories without `tokenizer.json`."""

from pathlib import Path
from random import Random

import aiohttp
import pytest

from bench.processes import FleetProcesses, FleetShape
from tests.system.e2e.client import MODEL, Client
from tests.system.e2e.conftest import BLOCK_SIZE, FAST_WORKER, QUIET_ROUTER
from tests.unit.kv_runtime.ranked_files import drawn_tokens, tekken, write_tekken

pytestmark = pytest.mark.asyncio
SAID = "the quick brown fox jumps over the lazy dog and the dog sleeps on " * 8
REQUESTS: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": SAID},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SAID}]},
}


async def test_text_for_a_tekken_model_is_routed_by_its_tokens(tmp_path: Path) -> None:
    text = write_tekken(tmp_path, tekken(drawn_tokens(Random(1))))
    template = "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    shape = FleetShape(
        workers=1,
        worker_settings=(*FAST_WORKER, f"engine.text={text}"),
        router_settings=(*QUIET_ROUTER, f"tokens.text={text}"),
    )
    async with FleetProcesses(shape) as fleet, aiohttp.ClientSession() as session:
        client = Client(session, fleet.data_url, fleet.control_url)
        for path, prompt in REQUESTS.items():
            body = {"model": MODEL, "max_tokens": 1, **prompt}
            await client.post(path, body)
            await client.until_index_has("w0")
            answered = await client.post(path, body)
            assert "x-kv-unrendered" not in answered.headers
            assert answered.overlap_blocks == answered.cached_tokens // BLOCK_SIZE > 10
        (worker,) = (await client.control("/v1/workers"))["workers"]
    assert [rank["trust"] for rank in worker["ranks"]] == ["EXACT"]
