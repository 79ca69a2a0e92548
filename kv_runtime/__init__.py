"""What every process needs, a closed list (one more module needs a decision record).

supervision of tasks and threads, clock, telemetry, configuration, extras, embedded nats-server, event log client,
control-plane HTTP, text.
"""
