"""Faults that are put into real engines, to prove that a verification finds them."""
