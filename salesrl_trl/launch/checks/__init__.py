"""Checks before a model's weights are loaded: one module for each subject, called by a run and by a preflight.

`launch.preflight.runner` decides the order. A setting by itself is checked in `config`, a row in `data`.
"""
