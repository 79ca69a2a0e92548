"""What other policies would do with recorded requests: simulated engines that are as fast as the recorded fleet."""
