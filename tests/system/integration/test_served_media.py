"""Media of served workers, put together as `serve` does: an encode worker, and another one that asks it."""

from kv_protocol.fleet_gate import FleetGate
from kv_protocol.images import FixedTokens, ImageRule
from kv_runtime.clock import SystemClock
from tests.system.integration.test_media_engine import (
    TOKENS_PER_IMAGE,
    Model,
    model,
    picture,
    prompt_of,
)
from tests.unit.router.samples import MODEL
from tests.unit.worker_agent.test_encode_workers import fleet_log
from worker_agent.commands.served_media import ServedMedia
from worker_agent.config import AgentSettings
from worker_agent.media.config import ImageModelSection

__all__ = ["model"]


async def test_a_worker_of_its_own_moves_no_embeddings(model: Model) -> None:
    settings = AgentSettings(images=ImageModelSection(tokens_per_image=TOKENS_PER_IMAGE))
    media = ServedMedia(settings, model.text, SystemClock(), model=MODEL, model_path=model.path)
    assert media.parts(0, fleet_log(), FleetGate()) == ()
    assert media.rule == ImageRule(placeholder="<image>", image_token_id=model.token, tokens=FixedTokens(8))
    assert len((await prompt_of(media.prompts, picture())).media) == 1
    assert [family.name for family in media.families("w")] == [
        "kvrouter_media_loaded", "kvrouter_media_loaded_bytes", "kvrouter_media_refused",
    ]  # fmt: skip
