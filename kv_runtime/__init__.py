"""Modules that every process needs, a closed list: another one needs a decision record.

Supervision of tasks and threads, clock, telemetry, configuration, extras, embedded nats-server, client of the event
log, HTTP of control planes and agents, text of models, traces, processes and their files.
"""
