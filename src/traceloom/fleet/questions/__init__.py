"""Questions about the fleet, answered from its tables."""
