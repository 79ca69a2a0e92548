"""The state of worker ranks: registrations, health, load, promised work, predictions, trust."""
