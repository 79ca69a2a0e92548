"""Modules that every process needs. The list is closed: do not add a module without a decision record.

Supervision of tasks and threads, clock, telemetry, configuration, extras, embedded nats-server, client of the event
log, HTTP of control planes and agents, text of models, traces, processes and their files.
"""
