"""A made fleet to look at."""
