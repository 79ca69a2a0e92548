"""A request from its bytes to the end of its answer.

endpoints.py, replies.py     which function answers a path
request.py                   the life of a request; `callback_coroutine.py` runs it without a task
destination.py               the interfaces that `request.py` calls: `Destination` serves requests, `Attempt` is a try
serving.py                   the `Destination` for the workers of a fleet: admission and decisions. Its other parts read
                             requests (`reading.py`, `route_request.py`), build the calls to workers (`calls.py`) and
                             record what happens (`records.py`, `tracing.py`)
handoff.py, resumption.py    the bodies of requests that a second worker continues
"""
