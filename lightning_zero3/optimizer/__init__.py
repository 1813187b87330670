# SPDX-License-Identifier: Apache-2.0
"""The Stage-3 optimizer: upstream's class with the parts of this package on top."""
