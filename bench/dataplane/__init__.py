"""`router bench dataplane`: what passing a request on costs, beside other routers."""
