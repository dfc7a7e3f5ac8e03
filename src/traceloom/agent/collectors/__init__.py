"""Collectors: each reads one kind of thing periodically and returns readings."""
