"""Protects vLLM through its plugin interface, without patching or forking it."""
