"""The core parts of a trainer. `wiring.part` defines what a part is and when each one is enabled."""
