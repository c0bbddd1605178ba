"""The evaluation of policies that are there already, by a run's own path, without training.

Owns:
- the policies, and the settings in which an evaluation differs from a run (`policies`);
- their answers and the rewards of these (`answers`);
- the figures, and the comparison of two policies (`findings`), as text (`text`).

Refuses to own the statistics: `salesrl_trl.evaluation.row_statistics` does. `__main__` has the command line.
"""
