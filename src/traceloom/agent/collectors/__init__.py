"""What the agent collects."""
