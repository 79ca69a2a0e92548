"""The router's decisions, pure: who is eligible, what each costs, who is chosen, what is promised."""
