"""What all recipes share: reading training text."""
