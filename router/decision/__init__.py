"""The choice of a rank for a request: which ranks are eligible, what each candidate costs, which one wins and why."""
