"""What the fidelity of the simulated fleet owes to each assumption that the calibration does not settle.

assumption               instead of
planned in step          the batch of an iteration is fixed while the one before it is computed
shared at the end        blocks can be reused from the moment in which their computation is scheduled
2048 tokens              an iteration computes up to 8192
16,384 tokens            an iteration computes up to 8192
no way to the engine     a request takes its own way first
no floor                 an iteration with a context lasts as long as launching its kernels
nothing beside           a sequence that decodes beside a context costs more than one beside others
blocks reserved          an answer's blocks are taken as it grows; where none is left, a request is preempted
"""

from msgspec.structs import replace

from bench.fidelity.closed_loop import EngineModel


def variants(model: EngineModel) -> dict[str, EngineModel]:
    """Return the model with one assumption changed at a time, by the names above."""
    scheduling, timing = model.scheduling, model.timing
    return {
        "planned in step": model._replace(scheduling=replace(scheduling, plans_ahead=False)),
        "shared at the end": model._replace(scheduling=replace(scheduling, shares_at_once=False)),
        "2048 tokens": model._replace(max_num_batched_tokens=2048),
        "16,384 tokens": model._replace(max_num_batched_tokens=16_384),
        "no way to the engine": model._replace(timing=replace(timing, request_base_s=0.0, prompt_token_s=0.0)),
        "no floor": model._replace(timing=replace(timing, context_floor_s=0.0)),
        "nothing beside": model._replace(timing=replace(timing, mixed_sequence_s=0.0)),
        "blocks reserved": model._replace(scheduling=replace(scheduling, preempts=False)),
    }
