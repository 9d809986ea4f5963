"""Adapters to other libraries: transformers and vLLM."""
