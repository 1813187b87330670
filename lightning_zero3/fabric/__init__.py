# SPDX-License-Identifier: Apache-2.0
"""The strategy for Fabric."""
