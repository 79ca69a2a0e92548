"""Publishes the KV events and heartbeats of an engine in this process.

simulated                                    polled
trtllm with KV events                        polled
trtllm without KV events; every encoder      no source: the ranks' streams are empty, only heartbeats are published
`events.sources`, of any engine              subscribed: a KV block manager's tiers
"""

from typing import Any

import zmq.asyncio

from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.tracing.service import EventTracing
from worker_agent.api.status import streams_status
from worker_agent.commands.engine_choice import BuiltEngine, EngineChoice
from worker_agent.config import AgentSettings
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.event_path import event_path
from worker_agent.events.mirror import ENGINE
from worker_agent.events.source_poller import Source


class ServedEvents:
    """The rules that translate events, and the event path of an engine that has been started."""

    def __init__(
        self,
        settings: AgentSettings,
        chosen: EngineChoice,
        built: BuiltEngine,
        model: str,
        instance: str,
        log: EventLog,
        context: zmq.asyncio.Context,
        clock: Clock,
        *,
        tracing: EventTracing | None,
    ) -> None:
        """Raise `ConfigurationError` if a source is of a rank that the engine has not."""
        self._description, events = built.engine.describe(), settings.events
        block_size = self._description.block_size
        self.rules = TrtllmRules(block_size)
        sources = self._sources(chosen, built)
        self.has_engine_events = bool(sources)
        """Whether the engine has KV events; `events.sources` alone do not tell of its own blocks."""
        self.path = event_path(
            sources,
            [each.at for each in events.sources],
            log,
            context,
            clock,
            model=model,
            worker_id=settings.worker.id,
            instance=instance,
            dp_ranks=self._description.dp_ranks,
            block_size=block_size,
            ring_bytes_max=events.batch_ring_bytes_max,
            tracing=tracing,
        )

    def status(self) -> dict[str, Any]:
        """Return the streams' positions and the sources' status, for operators."""
        return {**streams_status([self.path.consolidator]), "sources": self.path.status()}

    def _sources(self, chosen: EngineChoice, built: BuiltEngine) -> dict[str, Source]:
        if not chosen.polls_events:
            return {}
        return {
            ENGINE: Source(
                built.engine.kv_events,
                self.rules.translate,
                buffer_events=chosen.event_buffer * len(self._description.dp_ranks),
                stale=self.rules.stale,
                events_lost=self.rules.events_lost,
                quarantine=self.rules.quarantine,
            )
        }
