"""The queue before the fleet: admission by headroom, priorities, fair shares of tenants."""
