"""What changes would save: changes, scenarios, bounds."""
