"""`gdn-jax bench`: what an engine takes and brings, with the flags and JSON keys of `vllm bench`."""
