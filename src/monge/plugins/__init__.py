"""Adapters to other libraries: transformers, vLLM and lm-eval."""
