"""Benchmarks as commands: every figure stands beside a peer measured in the same run, since machines are noisy."""
