"""The agent's rules, pure: translation of engine events, consolidation, outbox, simulated engine."""
