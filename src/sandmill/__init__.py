"""Sandmill: the execution platform for agentic reinforcement learning."""
