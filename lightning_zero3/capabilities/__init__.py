"""What the installed packages do and lack, and what may be combined here."""
