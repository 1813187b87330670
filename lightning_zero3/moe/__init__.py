# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts wiring: which preset fits a model, and how DeepSpeed's AutoEP is pointed at it."""
