"""HTTP handlers of the service."""
