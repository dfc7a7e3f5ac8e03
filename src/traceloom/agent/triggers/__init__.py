"""Rules that trigger traces on this host: conditions, budgets and requests."""
