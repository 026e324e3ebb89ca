"""Backends: `base` (the protocols), `node` (noded), `fake` (in memory), `conformance` (the suite that both pass)."""
