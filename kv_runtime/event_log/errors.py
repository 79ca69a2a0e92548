"""The errors of the event log, and the mapping of the NATS client's exceptions to them."""

from collections.abc import Iterator
from contextlib import contextmanager

from nats.errors import Error as NatsError
from nats.js.errors import APIError, ServiceUnavailableError

_NO_PEERS_YET = 10005
"""The error code of a cluster while too few of its servers are connected for a stream's replicas."""


class BrokerUnavailable(Exception):
    """The server is unreachable, or refused the operation, which may be repeated."""


class StoppedUnconnected(BrokerUnavailable):
    """The process was asked to stop while it waited for the server."""


class LastSequenceDiffers(BrokerUnavailable):
    """The newest message of a subject has another seq than the publication requires; nothing was stored."""


class BrokerSilent(BrokerUnavailable):
    """The server did not answer in time, or said that it cannot serve yet, as a cluster without a leader does."""


class StreamUnfit(Exception):
    """A stream of that name exists, with a setting that differs from ours and that we must not change."""


class NoSuchObject(Exception):
    """The bucket has no object of that name."""


class ObjectDamaged(Exception):
    """The bytes under the name are not those that were put."""


@contextmanager
def mapped(what: str) -> Iterator[None]:
    """Map the client's exceptions to `BrokerUnavailable`, with `what` before the message."""
    try:
        yield
    except (TimeoutError, ServiceUnavailableError) as error:
        raise BrokerSilent(f"{what}: {str(error) or type(error).__name__}") from error
    except APIError as error:
        unavailable = BrokerSilent if error.err_code == _NO_PEERS_YET else BrokerUnavailable
        raise unavailable(f"{what}: {error}") from error
    except (NatsError, OSError) as error:
        raise BrokerUnavailable(f"{what}: {str(error) or type(error).__name__}") from error
