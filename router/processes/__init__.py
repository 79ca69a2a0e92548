"""One router in several processes: the parent that runs them, and the control plane of all."""
