"""What other tools hand over and take: StableHLO and exported functions in, e-graphs out."""
