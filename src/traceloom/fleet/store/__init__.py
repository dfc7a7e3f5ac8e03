"""Where the service keeps what it knows."""
