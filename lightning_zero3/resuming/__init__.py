# SPDX-License-Identifier: Apache-2.0
"""A fit that goes on where it was interrupted: what is saved for that, and what is done with it."""
