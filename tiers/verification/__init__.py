"""Whether an engine computes what another one does: the same model, and the same probabilities."""
