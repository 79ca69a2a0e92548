"""Prefill and decode simulators, and the exchange between them, in virtual time, with every output of a request."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tests.unit.properties.transfer_exchange import TransferExchange
from worker_agent.engines.simulated.scheduler import Simulator, Step
from worker_agent.engines.simulated.transfer import NETWORK, TransferRules
from worker_agent.port.types import EngineDescription, EngineOutput, EngineRequest

ENGINE = EngineDescription(
    model="m",
    version="1",
    event_source="simulated",
    block_size=4,
    total_kv_blocks=32,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_seq_len=120,
)


@dataclass
class Answer:
    """What a request was told: by its prefill engine, by its decode engine."""

    prefill: list[EngineOutput] = field(default_factory=list)
    decode: list[EngineOutput] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.decode for token in output.token_ids]

    @property
    def reasons(self) -> list[str]:
        return [output.finish_reason for output in self.decode if output.finish_reason]


class Fleet:
    """Engines `prefill-n` and `decode-n`; `ask` prefills, then decodes as soon as the first token is there."""

    def __init__(
        self,
        rules: TransferRules = NETWORK,
        *,
        prefill: int = 1,
        decode: int = 1,
        kind: type[Simulator] = Simulator,
    ) -> None:
        self.now_s = 0.0
        self.exchange = TransferExchange()
        self.engines: dict[str, Simulator] = {}
        self.steps: dict[str, tuple[float, Step]] = {}
        self.answers: dict[str, Answer] = {}
        self._then: dict[str, Callable[[EngineOutput], None]] = {}
        for number in range(prefill):
            self.add(f"prefill-{number}", kind(ENGINE, role="prefill", transfers=rules))
        for number in range(decode):
            self.add(f"decode-{number}", kind(ENGINE, role="decode", transfers=rules))

    def add(self, name: str, simulator: Simulator) -> None:
        self.engines[name] = simulator
        self.exchange.join(name, simulator)

    def kill(self, name: str) -> None:
        """The engine is gone, and all that it computed."""
        del self.engines[name]
        self.steps.pop(name, None)
        self.exchange.leave(name, self.now_s)

    def ask(self, request: EngineRequest, prefill: str = "prefill-0", decode: str | None = "decode-0") -> None:
        """Prefill; then decode what was handed over, unless `decode` is None or its engine is gone."""
        answer = self.answers[request.request_id] = Answer()

        def go_on(output: EngineOutput) -> None:
            answer.prefill.append(output)
            if output.handoff is not None and decode in self.engines:
                self.submit(decode, msgspec.structs.replace(request, handoff=output.handoff), answer.decode.append)

        self.submit(prefill, request, go_on)

    def submit(self, name: str, request: EngineRequest, then: Callable[[EngineOutput], None]) -> None:
        self.engines[name].submit(request, self.now_s)
        self._then[f"{name}/{request.request_id}"] = then

    def next_s(self) -> float | None:
        """When something happens next; the present where an engine can begin an iteration."""
        if any(name not in self.steps and engine.has_work for name, engine in self.engines.items()):
            return self.now_s
        times_s = [ends_s for ends_s, _ in self.steps.values()]
        if (exchange_s := self.exchange.next_s) is not None:
            times_s.append(exchange_s)
        return min(times_s, default=None)

    def turn(self, at_s: float) -> None:
        """Let happen what happens at `at_s`, and begin iterations."""
        self.now_s = max(self.now_s, at_s)
        self.exchange.advance(self.now_s)
        for name in [name for name, (ends_s, _) in self.steps.items() if ends_s <= self.now_s]:
            _, step = self.steps.pop(name)
            self.engines[name].flush_events()
            for request_id, output in step.outputs:
                self._then[f"{name}/{request_id}"](output)
        for name, engine in list(self.engines.items()):
            if name not in self.steps and engine.has_work:
                step = engine.step(self.now_s)
                self.steps[name] = (self.now_s + step.duration_s, step)
                self.exchange.begin(name, step.fetches, self.now_s)

    def run(self, until_s: float = float("inf"), turns_max: int = 20_000) -> None:
        """Let time pass until `until_s`, or until nothing can happen any more."""
        for _ in range(turns_max):
            at_s = self.next_s()
            if at_s is None or at_s > until_s:
                return
            self.turn(at_s)
        raise AssertionError(f"still busy after {turns_max} turns")

    def used_blocks(self) -> dict[str, int]:
        return {name: engine.pool_statistics().used_blocks for name, engine in self.engines.items()}


def alone(request: EngineRequest) -> list[int]:
    """Return the tokens of an aggregated engine that has nothing else to do."""
    simulator, tokens = Simulator(ENGINE), []
    simulator.submit(request, 0.0)
    while simulator.has_work:
        tokens += [token for _, output in simulator.step(0.0).outputs for token in output.token_ids]
    return tokens
