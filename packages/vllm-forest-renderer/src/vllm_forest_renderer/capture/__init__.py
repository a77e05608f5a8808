"""What a generation leaves behind: tokens, log-probabilities, weight versions, one record."""
