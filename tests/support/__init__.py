"""What several tests make their input with."""
