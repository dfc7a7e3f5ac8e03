"""The agent's link to the fleet."""
