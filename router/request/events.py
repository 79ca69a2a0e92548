"""What a request's machine receives (events), and what it returns to be carried out (commands).

An event says what happened; a command says what its driver (`driver.py`) is to do. Neither does any I/O. A `Record` is
a fact for ledgers, metrics and logs. All are structs, which are made in less time than named tuples; without `gc` where
nothing that they hold can refer back to them.
"""

from typing import Literal, get_args

from msgspec import Struct

from kv_protocol.continuation import Progress
from kv_protocol.decision import Exclusion
from kv_protocol.journal import OutcomeName
from kv_protocol.openai.requests import Inbound
from router.request.attempt import Attempt
from router.request.handoff import PrefillAnswer
from router.request.plan import Phases, Reroute
from router.request.refusals import Refusal
from router.request.usage import NO_USAGE, Usage
from router.server.exchange import UpstreamStage
from router.server.heads import Headers

StreamLoss = Literal["not_resumable", "no_seam", "no_worker"]
"""Why a cut stream ends: its ids or events are not known, or the limit is reached; the next worker would not continue
it where it was cut; no worker is left."""
STREAM_LOSSES: tuple[StreamLoss, ...] = get_args(StreamLoss)

# ------------------------------------------------------------------------------------------- events


class Parsed(Struct, frozen=True):
    """The request was read, and its phases are planned. `isl_tokens`: of its prompt; 0: unknown."""

    plan: Phases
    inbound: Inbound
    isl_tokens: int


class Refused(Struct, frozen=True):
    """The request cannot be read, is turned away by the queue, or met a fault of the router."""

    refusal: Refusal


class Admitted(Struct, frozen=True, gc=False):
    """The queue lets the request go on."""


class Chosen(Struct, frozen=True):
    """A worker was chosen, in answer to `Decide`."""

    attempt: Attempt


class NotChosen(Struct, frozen=True):
    """No worker was chosen. `exclusions`: why no rank is eligible; None: no other phase is to be tried either."""

    refusal: Refusal
    exclusions: tuple[Exclusion, ...] | None


class HeadCame(Struct, frozen=True):
    """The head of a worker's answer came. `is_last`: no other worker can be tried."""

    status: int
    headers: Headers
    is_last: bool = False


class FirstByteCame(Struct, frozen=True, gc=False):
    """The first byte of the answer's body came."""


class AnswerEnded(Struct, frozen=True, gc=False):
    """The answer is complete. `body` is all of a collected answer, else the end of it.

    `later_events` counts the events of a stream behind its first bytes, or the tokens that comments state.
    """

    body: bytes
    later_events: int


class AnswerDropped(Struct, frozen=True, gc=False):
    """The answer to which the machine returned `Drop` is read or closed."""


class CallFailed(Struct, frozen=True, gc=False):
    """The worker failed. `has_begun`: the client has part of its answer, which was ended."""

    stage: UpstreamStage
    reason: str
    has_begun: bool


class StreamCut(Struct, frozen=True):
    """The worker failed in the middle of an event stream. `events` are those that it sent; None: they are not kept.

    `before` is where it continued another worker's stream, if that is not the last worker's progress.
    """

    stage: UpstreamStage
    reason: str
    events: bytes | None
    before: Progress | None = None


class ResumeFailed(Struct, frozen=True, gc=False):
    """The chosen worker cannot continue the stream; `elsewhere`: another may."""

    elsewhere: bool


class ServedElsewhere(Struct, frozen=True, gc=False):
    """A gateway sent the request to another endpoint of its list: the chosen worker gave it no answer."""


class ClientLeft(Struct, frozen=True, gc=False):
    """The client closed its connection."""


Event = (
    Parsed
    | Refused
    | Admitted
    | Chosen
    | NotChosen
    | ServedElsewhere
    | HeadCame
    | FirstByteCame
    | AnswerEnded
    | AnswerDropped
    | CallFailed
    | StreamCut
    | ResumeFailed
    | ClientLeft
)

# ------------------------------------------------------------------------------------------- commands


class MakeRoute(Struct, frozen=True, gc=False):
    """Make the routing fields for the plan's present phase, under a new decision id."""


class Queue(Struct, frozen=True, gc=False):
    """Wait for room; `Admitted` or `Refused` follows."""


class Decide(Struct, frozen=True, gc=False):
    """Choose a worker; `Chosen` or `NotChosen` follows."""


class Send(Struct, frozen=True):
    """Send the request to the chosen worker; the events of its answer follow.

    `is_aside`: the answer is collected, not passed on. `keeps_events`: the events of a stream are kept, so that another
    worker can resume it. `handoff` is the prefill worker's answer, `progress` how far the answer has come.
    """

    attempt: Attempt
    is_aside: bool
    keeps_events: bool
    handoff: PrefillAnswer | None
    progress: Progress | None


class Relay(Struct, frozen=True):
    """Pass the answer on. `prefilled_by` computed the prompt; None: the same worker."""

    attempt: Attempt
    prefilled_by: Attempt | None
    is_aside: bool


class Drop(Struct, frozen=True, gc=False):
    """Read or close the answer without passing it on; `AnswerDropped` follows."""


class Reply(Struct, frozen=True):
    """Answer the client with a complete answer of a worker; `events`: the same as an event stream, if it wants one."""

    attempt: Attempt
    body: bytes
    events: bytes


class Refuse(Struct, frozen=True):
    """Answer the client with an error of the router."""

    refusal: Refusal


class FinishStream(Struct, frozen=True, gc=False):
    """End the client's event stream with these events; empty: it goes on with the next worker's."""

    events: bytes


class Retry(Struct, frozen=True, gc=False):
    """Decide again after the pause that precedes the retry of this number, 1 the first; `Decide` after it."""

    number: int


class GiveUp(Struct, frozen=True):
    """Close the call whose answer is collected. With a `handoff`, have a decode worker fetch the KV kept for it."""

    handoff: PrefillAnswer | None
    progress: Progress | None


class Record(Struct, frozen=True):
    """A fact that is to be counted, or entered in a ledger; its subclasses are the facts."""


Command = MakeRoute | Queue | Decide | Send | Relay | Drop | Reply | Refuse | FinishStream | Retry | GiveUp | Record

# ------------------------------------------------------------------------------------------- facts


class Retried(Record, frozen=True, gc=False):
    """Another worker was chosen after one failed at this stage."""

    stage: UpstreamStage


class Rerouted(Record, frozen=True, gc=False):
    """The request left its first plan."""

    why: Reroute


class StreamLost(Record, frozen=True, gc=False):
    """A stream that had begun ends with an error."""

    why: StreamLoss


class Unserved(Record, frozen=True):
    """The request is refused because no worker is eligible."""

    exclusions: tuple[Exclusion, ...]


class AnswerBegan(Record, frozen=True):
    """The worker computed the prompt. `is_first_token`: the client's first token came now."""

    attempt: Attempt
    is_first_token: bool


class AttemptOver(Record, frozen=True):
    """A worker's part is over. `later_tokens`: tokens of its answer behind the first; None: it was not completed."""

    attempt: Attempt
    outcome: OutcomeName
    usage: Usage = NO_USAGE
    came_whole: bool = False
    later_tokens: int | None = None


class Answered(Record, frozen=True):
    """The client has its answer. `is_first_token`: all of it came at once, its first token too."""

    attempt: Attempt
    usage: Usage
    is_first_token: bool


class RequestOver(Record, frozen=True):
    """The request ended."""

    outcome: OutcomeName
    refusal: Refusal | None
