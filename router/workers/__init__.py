"""Several processes that serve as one router: what they share, and how they find one another."""
