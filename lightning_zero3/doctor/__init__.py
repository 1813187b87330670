# SPDX-License-Identifier: Apache-2.0
"""``lightning-zero3 doctor``: what this machine and these versions can do, and whether ``zero3_fast`` trains here.

The command's own process imports neither torch nor DeepSpeed, so that nothing broken there can stop it. A child does:
it reports section by section, trains one step, and is ended if it takes too long.
"""
