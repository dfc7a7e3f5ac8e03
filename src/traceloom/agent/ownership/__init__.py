"""Who owns a process."""
