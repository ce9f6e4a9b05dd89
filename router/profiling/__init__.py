"""Measure what each tier costs in quality and time."""
