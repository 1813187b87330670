"""Checkpoints: how they are written, read and checked."""
