"""HTTP handlers of the agent."""
