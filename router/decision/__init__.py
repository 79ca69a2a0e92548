"""Which rank gets a request: what is eligible, what each candidate costs, which is chosen and why."""
