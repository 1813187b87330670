# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: how they are written, read and checked."""
