"""Content tables and builders of the packaged demo data set."""
