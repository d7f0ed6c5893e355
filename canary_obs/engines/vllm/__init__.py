"""vLLM, protected from outside: no patch, no fork, one environment variable."""
