"""What people watch: the fleet now and before, the newest decisions, and which prefixes are warm."""
