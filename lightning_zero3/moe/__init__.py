"""Mixture-of-experts wiring: which preset fits a model, and how DeepSpeed's AutoEP is pointed at it."""
