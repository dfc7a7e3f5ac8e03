"""Files, processes, signals, text and units: what the other packages need of the operating system."""
