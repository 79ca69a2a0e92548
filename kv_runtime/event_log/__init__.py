"""The event log's client: `connection.EventLog`; the other modules are its parts."""

from kv_runtime.event_log.connection import (
    CONFIRM_S,
    WINDOW_MESSAGES,
    EventLog,
    LogStatistics,
    connected_log,
    log_families,
)
from kv_runtime.event_log.errors import (
    BrokerSilent,
    BrokerUnavailable,
    LastSequenceDiffers,
    NoSuchObject,
    ObjectDamaged,
    StoppedUnconnected,
    StreamUnfit,
)
from kv_runtime.event_log.objects import ObjectBucket, bucket_spec
from kv_runtime.event_log.reading import OnMessage, Reading
from kv_runtime.event_log.streams import LogMessage, LogStreamState, StreamSpec

__all__ = [
    "CONFIRM_S",
    "WINDOW_MESSAGES",
    "BrokerSilent",
    "BrokerUnavailable",
    "EventLog",
    "LastSequenceDiffers",
    "LogMessage",
    "LogStatistics",
    "LogStreamState",
    "NoSuchObject",
    "ObjectBucket",
    "ObjectDamaged",
    "OnMessage",
    "Reading",
    "StoppedUnconnected",
    "StreamSpec",
    "StreamUnfit",
    "bucket_spec",
    "connected_log",
    "log_families",
]
