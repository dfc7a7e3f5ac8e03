"""A made fleet to look at: weeks of a few teams whose regressions, slow host and idle devices are planted."""
