"""Pure array functions: the kernels of GDN hybrid models, each beside the slow version that defines it.

Imports nothing of the rest of the project. Public functions live in the packages `gated_delta`, `causal_conv1d`,
`paged_attention`, `grouped_matmul` and the module `gated_rms_norm`; row descriptions in `anchors`.
"""
