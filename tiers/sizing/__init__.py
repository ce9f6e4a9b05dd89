"""What a model needs, and what GPUs carry, before anything is started."""
