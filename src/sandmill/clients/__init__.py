"""Adapters that let other people's programs, unmodified, run in Sandmill's sandboxes; one module a program.

Nothing in sandmill imports them, and what they import of their program is an extra of the same name.
"""
