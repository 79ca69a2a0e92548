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


def latency_of(
    first_s: float | None, duration_s: float, later_tokens: int, decode_s: float | None, *, is_streamed: bool
) -> tuple[float | None, float | None]:
    """Return the seconds from the decision to the first token, and the mean time between tokens; None: not known.

    `first_s`, `duration_s`: seconds from the decision to the first byte, and to the end. `later_tokens` came after the
    first; 0: none, or their number is unknown. `decode_s`: of an unstreamed answer, seconds from its first token to its
    end, by its worker's clock; None: not stated.
    """
    if is_streamed:
        ttft_s, decode_s = first_s, None if first_s is None else duration_s - first_s
    elif decode_s is None or decode_s > duration_s:  # not stated, or implausible
        return None, None
    else:
        ttft_s = duration_s - decode_s
    return ttft_s, decode_s / later_tokens if decode_s and later_tokens > 0 else None
