"""Building: a problem, a schedule, a config and an arch in, a module and its sources out."""
