"""Running a recorded workload again."""
