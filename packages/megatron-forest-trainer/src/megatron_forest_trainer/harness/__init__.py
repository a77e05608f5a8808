"""The example agent: a plain client of the OpenAI API that rewrites its context.

Guarantees: nothing in here knows of tokens, captures or training.
"""
