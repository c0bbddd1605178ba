"""The parts of a trainer that belong to the core. `wiring.part` says what a part is, and what turns each on."""
