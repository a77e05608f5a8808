"""The OpenAI routes of an attempt."""
