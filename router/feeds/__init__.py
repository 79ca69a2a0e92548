"""What a router is fed: fleet events, heartbeats and load reports, stored rates; and what it logs of the fleet."""
