"""What goes wrong with the event log, by whose fault, and the seam at which the client's exceptions end."""

from collections.abc import Iterator
from contextlib import contextmanager

from nats.errors import Error as NatsError
from nats.js.errors import APIError, ServiceUnavailableError

_NO_PEERS_YET = 10005
"""A cluster's word while too few of its servers have found each other for a stream's replicas."""


class BrokerUnavailable(Exception):
    """The server cannot be reached, or did not do as asked; what was meant to be done may be tried again."""


class LastSequenceDiffers(BrokerUnavailable):
    """The newest message of a subject has another place than the publication requires; nothing was stored."""


class BrokerSilent(BrokerUnavailable):
    """The server did not answer in time, or says that it cannot yet: a cluster without leaders does so."""


class StreamUnfit(Exception):
    """A stream of that name exists, with a setting that cannot be ours and that is not ours to change."""

    def __init__(self, stream: str, field: str, found: object, allowed: object) -> None:
        super().__init__(f"stream {stream}: {field}: found {found}, allowed {allowed}")
        self.stream, self.field, self.found, self.allowed = stream, field, found, allowed


class NoSuchObject(KeyError):
    """The bucket has no object of that name."""

    def __str__(self) -> str:
        return f"no object {self.args[0]}"


class ObjectDamaged(Exception):
    """What the bucket has under the name is not what was put there."""


@contextmanager
def mapped(what: str) -> Iterator[None]:
    """Raise what the client raises as `BrokerUnavailable`, with `what` before its words."""
    try:
        yield
    except (TimeoutError, ServiceUnavailableError) as error:
        raise BrokerSilent(f"{what}: {str(error) or type(error).__name__}") from error
    except APIError as error:
        unavailable = BrokerSilent if error.err_code == _NO_PEERS_YET else BrokerUnavailable
        raise unavailable(f"{what}: {error}") from error
    except (NatsError, OSError) as error:
        raise BrokerUnavailable(f"{what}: {str(error) or type(error).__name__}") from error
