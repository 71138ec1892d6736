"""What tapestry-egg is measured against, and the scripts that measure."""
