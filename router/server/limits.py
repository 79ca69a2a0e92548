"""What the data plane takes from its clients, and how long it waits for them."""

import msgspec


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, counts and seconds; what is beyond them is refused or closed."""

    body_bytes_max: int = 64 << 20
    bodies_bytes_max: int = 1 << 30
    """Of all requests together, until they are answered; a body that comes in one read is not counted."""
    head_s: float = 20.0
    """How long a request's head may take, from its first byte, or from the connection's beginning."""
    body_s: float = 30.0
    """How long a request's body may pause."""
    body_total_s: float = 300.0
    """How long all of a request's body may take."""
    body_rate_min_bytes_s: float = 500.0
    """What a body must average once it has taken `body_s`; 0: any rate will do."""
    idle_s: float = 75.0
    """How long a connection is kept between requests."""
    write_s: float = 60.0
    """How long a client may read nothing of what it is sent."""
    linger_s: float = 2.0
    """How long a client that is sent away may go on sending, so that it reads why."""
    connections_max: int = 16_384
    pipelined_bytes_max: int = 64 << 10
    """What is read of later requests while one is served; then reading stops until it is answered."""
    write_bytes_max: int = 64 << 10
    """What may wait for a slow reader; then its worker is read no more until it has read a quarter of that."""
    worker_connections_max: int = 16_384
    worker_idle_s: float = 4.0
    """How long a worker's connection is kept for the next request; less than servers' own (uvicorn: 5 s)."""
    drain_s: float = 30.0
    """How long running requests may take after a stop."""
    drain_idle_s: float = 1.0
    """How long, after a stop, a connection without a request may still bring one, which is served."""
    sweep_s: float = 0.5
    """How late any of these times may be noticed."""
