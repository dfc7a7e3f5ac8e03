"""The ranks of a job against each other: who arrived last and why, slow ranks and steps, imbalance, pipelines."""
