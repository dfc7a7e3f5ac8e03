"""What a trace and a session are: columns, units, storage, cache."""
