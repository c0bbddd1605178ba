"""The parts of a trainer that come with the package: `wiring.part` says what a part is, and what turns each on.

A module here connects one of them to a trainer. What it does lies in the package that it imports.
"""
