"""A small recorded fleet, made by the simulator itself, so that a test knows how faithful it is."""

from typing import Any

import msgspec

from bench.fidelity.closed_loop import PLACEMENTS, ClosedLoop, EngineModel
from bench.fidelity.fit_timing import LatencyRow
from bench.fidelity.recording import COLUMNS, FleetFigures, Recording, Session
from worker_agent.engines.simulated.timing import H200_8B, H200_8B_MIXED, EngineTiming

SESSIONS = tuple(
    Session(
        number % 2,
        tuple(100 + 10 * number + turn for turn in range(4)),
        tuple(5 + number % 3 + turn for turn in range(4)),
    )
    for number in range(14)
)


def recording(**changes: Any) -> Recording:
    """A workload on engines whose caches are too small for all of it."""
    whole = Recording(
        engine="e",
        gpu="g",
        model="m",
        blocks_per_worker=250,
        block_size=16,
        max_num_seqs=4,
        concurrency=6,
        system_tokens=(320, 500),
        sessions=SESSIONS,
        runs=(),
    )
    return whole._replace(**changes)


def slowed(factor: float) -> EngineTiming:
    """An H200 that needs `factor` times as long."""
    seconds = {
        name: getattr(H200_8B_MIXED, name) * factor for name in EngineTiming.__struct_fields__ if name.endswith("_s")
    }
    return msgspec.structs.replace(H200_8B_MIXED, **seconds)


def fleet_json(timing: EngineTiming = H200_8B_MIXED, workers: int = 3, **changes: Any) -> dict[str, Any]:
    """What a fleet of such engines would have recorded."""
    workload = recording(**changes)
    runs = []
    for policy, placement in PLACEMENTS.items():
        played = ClosedLoop(workload, EngineModel(timing), placement(0), workers=workers).play()
        requests_per_s = len(played.answered) / played.makespan_s
        runs.append(
            {
                "policy": policy,
                "workers": workers,
                "requests": len(played.answered),
                "seconds": played.makespan_s,
                "req_s": requests_per_s,
                "hit": FleetFigures.of(played.answered, requests_per_s).hit_ratio,
                "rows": [
                    [each.isl_tokens, each.cached_tokens, each.ttft_s, each.e2e_s, each.itl_s, each.worker, each.turn]
                    for each in played.answered
                ],
            }
        )
    said = workload._asdict()
    said["system_prompt_tokens"] = said.pop("system_tokens")
    said["sessions"] = [msgspec.structs.asdict(session) for session in workload.sessions]
    return {**said, "columns": list(COLUMNS), "runs": runs}


def calibration_json() -> dict[str, Any]:
    """What would have been measured of one such engine."""
    rows = [
        LatencyRow("ttft", isl, 1.0, cached=isl * part // 4) for isl in (64, 512, 2048, 16_384) for part in range(4)
    ]
    rows += [LatencyRow("itl", 1024, 1.0, batch=batch) for batch in (1, 8, 32, 64, 128, 256)]
    measured = [msgspec.structs.replace(row, ms=row.modelled_ms(H200_8B)) for row in rows]
    return {"engine": "e", "gpu": "g", "model": "m", "rows": [msgspec.structs.asdict(row) for row in measured]}
