"""Sandmill behind other people's harnesses: one module a client, each imported by its client alone."""
