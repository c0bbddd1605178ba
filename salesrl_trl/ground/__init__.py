"""What serves every other package, with the standard library alone. Refuses to know anything of the packages above."""
