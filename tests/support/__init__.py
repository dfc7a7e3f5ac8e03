"""What tests, benchmarks and scripts make their input with, and the slow, simple code that they judge by."""
