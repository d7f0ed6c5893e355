"""Protects the reference engine, on which the canary is demonstrated and tested."""
