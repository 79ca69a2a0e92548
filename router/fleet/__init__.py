"""The state of worker ranks: registrations, silence, circuit breakers, trust."""
