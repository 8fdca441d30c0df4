"""What a run tells of itself: statistics, episodes, and its timeline."""
