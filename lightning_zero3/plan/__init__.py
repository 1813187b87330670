# SPDX-License-Identifier: Apache-2.0
"""What a run at its true scale will be like, found out without its GPUs."""
