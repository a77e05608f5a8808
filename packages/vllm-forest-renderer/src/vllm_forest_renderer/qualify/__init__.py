"""Says of a model directory, rule by rule, whether its prompts can be spliced."""
