"""Kernels that are written for GPUs, run on a CPU: the packages' own Triton code, interpreted.

Triton's interpreter computes a kernel block by block with numpy. So what transformers calls on a
GPU (`fla`, `mamba_ssm`, flash-attn's Triton backend, Liger's) computes forward and backward on
tensors of a CPU, with the bounds of documents that autopack hands over. What those packages compile
from C++ is here in torch, with the checks of its source."""
