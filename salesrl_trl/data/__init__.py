"""From a file's record to a `SalesRow`."""
