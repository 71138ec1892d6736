"""One device: small programs whose plans are run, and what is measured there."""
