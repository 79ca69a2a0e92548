"""TTFT and ITL of an answer: when each is known, and when not.

| answer | first token | mean time between tokens |
|---|---|---|
| event stream | its first bytes | from there to its end, per later token; not known if all came at once |
| a prefill worker's | its end: it has one token | |
| another complete one whose worker states the decode time | its end, less that time | that time, likewise |
| any other | not known: its first byte came with its last token | not known |

Tokens are counted by `usage`; in a stream without it by token comments, else by its events. An engine that puts several
tokens into one event makes the time between events an upper bound. Where an answer has several choices it is not known
which token followed which. What is not known is None, and is not counted.
"""

from typing import NamedTuple


class Arrival(NamedTuple):
    """How an answer arrived. `later_tokens` came after the first; 0: none, or their number is unknown."""

    is_streamed: bool
    later_tokens: int
    decode_s: float | None = None
    """Of an unstreamed answer: time from its first token to its end, by its worker's clock; None: not stated."""


class Latency(NamedTuple):
    """Seconds from the decision to the first token, and mean time between tokens; None: not known."""

    ttft_s: float | None
    itl_s: float | None


def latency_of(arrival: Arrival, first_s: float | None, duration_s: float) -> Latency:
    """Compute both; `first_s`, `duration_s`: seconds from the decision to the first byte, and to the end."""
    if arrival.is_streamed:
        ttft_s, decode_s = first_s, None if first_s is None else duration_s - first_s
    else:
        decode_s = arrival.decode_s
        if decode_s is not None and decode_s > duration_s:  # implausible
            decode_s = None
        ttft_s = None if decode_s is None else duration_s - decode_s
    if not decode_s or arrival.later_tokens < 1:
        return Latency(ttft_s, None)
    return Latency(ttft_s, decode_s / arrival.later_tokens)
