# SPDX-License-Identifier: Apache-2.0
"""Step times and memory: names in one table, arithmetic apart from collection, no strategy imported."""
