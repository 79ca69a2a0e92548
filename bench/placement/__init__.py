"""`router bench placement`: our modes and the rules of other routers in many regimes."""
