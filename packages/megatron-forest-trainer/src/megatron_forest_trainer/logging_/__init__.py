"""What a run tells its user: progress while it works, and one record per optimizer step."""
