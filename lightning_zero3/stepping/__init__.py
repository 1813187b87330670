# SPDX-License-Identifier: Apache-2.0
"""Steps: which backward is a step's last, when one is taken, and whether it counts."""
