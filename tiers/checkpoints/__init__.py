"""Checkpoints: what they are, how they are checked, and how the three are made."""
