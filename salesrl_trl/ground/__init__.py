"""Utilities for every other package. Standard library only; must not depend on the packages above."""
