# SPDX-License-Identifier: Apache-2.0
"""What the installed packages do and lack, and what may be combined here."""
