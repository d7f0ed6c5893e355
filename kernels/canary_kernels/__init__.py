"""Record mathematics of canary_obs: PyTorch references and Triton kernels. Knows no engine and no runtime."""
