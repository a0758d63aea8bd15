"""lamp doctor: staged probes, each in a child of its own with a deadline; goes on past a failure."""
