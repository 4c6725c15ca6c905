"""From the settings of a simulation to its figures."""
