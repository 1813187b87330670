# SPDX-License-Identifier: Apache-2.0
"""Two settings of a training side by side, from the logs of their runs: ``lightning-zero3 compare``."""
