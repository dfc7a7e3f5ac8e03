"""Detection and diagnosis of jobs that stop making steps."""
