# SPDX-License-Identifier: Apache-2.0
"""What all recipes share."""
