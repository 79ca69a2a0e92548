"""Modules that every process needs, a closed list (another module needs a decision record).

supervision of tasks and threads, clock, telemetry, configuration, extras, embedded nats-server, event log client,
control-plane HTTP, text.
"""
