"""Engines that are simulated: a GPU's timing, text that no model wrote. Programs of their own; no GPU and no vLLM."""
