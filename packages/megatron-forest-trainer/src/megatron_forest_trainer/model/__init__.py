"""The model: Hugging Face configuration and weights, Megatron-Core modules, process groups.

Guarantees: see the modules. `hf_config` and `weight_map` are pure; `transformer` builds the model;
`hf_io` reads and writes checkpoint directories.
"""
