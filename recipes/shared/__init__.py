"""What all recipes share."""
