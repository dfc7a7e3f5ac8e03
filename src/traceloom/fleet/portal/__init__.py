"""The web portal of the fleet."""
