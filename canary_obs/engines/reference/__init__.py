"""A small real LLM engine: the harness that the canary is demonstrated and tested on."""
