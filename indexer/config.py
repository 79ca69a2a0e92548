"""The stand-alone index's configuration tree."""

from kv_runtime.config.sections import ControlSection, IndexSection, NatsSection, Settings, TelemetrySection
from kv_runtime.tracing.service import TracingSection


class IndexerSettings(Settings):
    """All sections of the configuration."""

    nats: NatsSection = NatsSection()
    control: ControlSection = ControlSection(port=8002)
    index: IndexSection = IndexSection()
    telemetry: TelemetrySection = TelemetrySection()
    tracing: TracingSection = TracingSection()
