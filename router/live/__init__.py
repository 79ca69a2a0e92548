"""What people watch: the fleet now and before, decisions as they are taken, and which prefixes are warm."""
