"""People look after runs: the plan before the money is spent."""
