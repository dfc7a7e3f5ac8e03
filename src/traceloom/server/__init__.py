"""HTTP shared by agent and fleet."""
