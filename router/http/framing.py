"""Reads message bodies: by length, in chunks, or to the end of the connection.

    chunked = chunk* last-chunk trailer* CRLF
    chunk   = size [extension] CRLF, `size` bytes, CRLF
    size    = 1 to 15 hexadecimal digits, nothing before or between them; 0 is the last chunk

Extensions and trailers are checked and forgotten; a line of them is bounded, and so are all trailers together. A
trailer that frames a message is refused: another reader may frame the next one by it.
Read in C++ (`router/native/body.cpp`). Sources: RFC 9112, section 7.1; RFC 9110, section 6.5.1.
"""

from router.http import heads as _heads  # noqa: F401 - it names the error that `BodyReader` raises
from router.native import built

LAST_CHUNK = b"0\r\n\r\n"
BodyReader = built.BodyReader
"""Reads one body, of a length in bytes, `CHUNKED` or `UNTIL_CLOSE`, piece by piece; however it is cut, it is the same.

    feed(data, payload)   appends the payload in `data` to `payload`; returns where in `data` the body ends, -1 if it
                          does not. Raises `Malformed`
    left                  missing bytes of the body, or of the present chunk
"""
AnswerBody = built.AnswerBody
"""An answer's body, read likewise; its payload waits to be taken. `AnswerBody(body_bytes, mark, is_later)`.

    feed(data)        reads the payload in `data`, raises as `BodyReader.feed`. While a stream `flows` it takes the
                      complete events, and returns them as the client gets them, empty where there are none. None: the
                      stream does not flow, nothing was taken before, the body ends, or what waits is to be judged
    end               where in the last `data` the body ends, -1 if it does not
    until_close       whether it ends with the connection
    pass_on(...)      says how a stream flows: `chunks` or not; what waits is judged if it has more bytes than
                      `pending_max` without an event's end, or one of the texts `alarms`; `kept` gets the events
    flows             whether a stream flows
    has_begun         whether a byte of the payload came
    size, pending     what waits
    has(text)         whether the text is in what waits
    take_events()     takes all complete events: up to the last empty line
    take(size)        takes this many bytes, or all that wait
    drop()            drops what waits
    marks             how many marks are in what was taken last; if `mark` is empty, how many events
    later             of a stream, marks behind the first piece that was taken with one; if it `is_later`, all
    has_end_mark      whether the end of all that was read has a stream's event `data: [DONE]`
    tail              the end of all that was taken, `TAIL_BYTES` at most
"""
TAIL_BYTES = built.TAIL_BYTES
KeptEvents = built.KeptEvents
"""Complete events, at most as many bytes as it gets; if there are more it keeps none, and `is_overfull`.

    add(events), events
"""
chunk = built.chunk
"""Returns the chunk that carries a payload, which is not empty."""
