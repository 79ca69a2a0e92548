"""The engines that the agent serves, with one interface (`port/`), and the servers of attached engines."""
