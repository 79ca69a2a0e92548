"""An engine that runs elsewhere: its health, its facts, its configuration."""
