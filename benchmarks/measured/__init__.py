"""Training runs that others measured, as JAX programs with pinned layouts."""
