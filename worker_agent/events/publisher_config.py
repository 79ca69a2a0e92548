"""The configuration of one publisher of engine events."""

from typing import Annotated

from pydantic import Field, model_validator

from kv_protocol.ids import DP_RANK_MAX
from kv_runtime.config.sections import Section
from worker_agent.events.consolidation import Origin
from worker_agent.events.engine_event_subscriber import PublisherAddress
from worker_agent.events.mirror import ENGINE
from worker_agent.events.publisher_addresses import checked_endpoint

_RANK = Annotated[int, Field(ge=0, le=DP_RANK_MAX)]


class PublisherSection(Section):
    """One publisher of hop A."""

    source: str = Field(ENGINE, pattern="^[a-z0-9_-]{1,32}$", description="the source of its events: engine, host, ...")
    endpoint: str = Field(description="its PUB socket: tcp://host:port or ipc://path")
    replay_endpoint: str = Field("", description="its ROUTER socket; empty: it has none, and every gap is a loss")
    dp_rank: _RANK | None = Field(None, description="the one rank it speaks for; null: its batches say which")
    allow_remote: bool = Field(default=False, description="other machines' addresses too; what they say is believed")

    @model_validator(mode="after")
    def _endpoints(self) -> "PublisherSection":
        checked_endpoint("endpoint", self.endpoint, allow_remote=self.allow_remote)
        if self.replay_endpoint:
            checked_endpoint("replay_endpoint", self.replay_endpoint, allow_remote=self.allow_remote)
        return self

    @property
    def at(self) -> PublisherAddress:
        """Its addresses, for an `EventPath`."""
        replay = self.replay_endpoint
        return PublisherAddress(
            Origin(self.source, self.dp_rank),
            checked_endpoint("endpoint", self.endpoint, allow_remote=self.allow_remote),
            replay and checked_endpoint("replay_endpoint", replay, allow_remote=self.allow_remote),
        )
