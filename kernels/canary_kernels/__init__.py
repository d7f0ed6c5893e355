"""Record mathematics of canary_obs as PyTorch references and Triton kernels. Knows no engine and no runtime."""
