"""The call stacks of a run as files for other viewers: speedscope and pprof."""
