"""Looking into a run: which calls were captured, which train, and what came of them."""
