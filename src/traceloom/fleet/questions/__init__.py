"""Questions to the fleet."""
