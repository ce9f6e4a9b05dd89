"""The router: HTTP in and out. Composes the classifier and the fleet."""
