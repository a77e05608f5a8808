"""The loss: edges, log-probabilities under the sampled distribution, clipped policy gradient.

Guarantees: see the modules. Sums and counts leave this package, never means.
"""
