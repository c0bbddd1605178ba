"""Converts file records to `SalesRow` objects."""
