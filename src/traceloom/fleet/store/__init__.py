"""State, tables and files of the service."""
