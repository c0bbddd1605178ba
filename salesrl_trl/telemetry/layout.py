"""The groups of figures under TensorBoard's "Custom Scalars" tab, made from `names.FIGURES`.

Owns the form that TensorBoard wants. A callback of the trainer, built by `wiring.components`.
"""

from collections.abc import Mapping, Sequence

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

from salesrl_trl.names import BRANCH, CATEGORIES, FIGURES, TRAIN, kl_of, meanings, pattern_of
from salesrl_trl.telemetry.trackers import spared

Chart = list[str | list[str]]
"""Kind of a chart, `"Multiline"` or `"Margin"`, and its tags."""
EDGES = (kl_of(BRANCH, "_low"), kl_of(BRANCH, "_high"))
"""With them the chart of a branch's KL is one with margins: the line, its lower edge, its upper edge."""


def custom_scalars(words: Mapping[str, Sequence[str]], banded: Sequence[str]) -> dict[str, dict[str, Chart]]:
    """The layout for `SummaryWriter.add_custom_scalars`: category, then title, then chart.

    `words` says what the words in braces of `FIGURES` stand for. `banded`: the branches whose KL has a band.
    """
    layout: dict[str, dict[str, Chart]] = {category: {} for category in CATEGORIES}
    for figure in FIGURES:
        for choice in meanings(figure.tag, words) if figure.chart is not None else ():
            is_edge = figure.tag in EDGES
            if is_edge and choice["branch"] not in banded:
                continue
            category, title = (name.format(**choice) for name in figure.chart or ())
            chart = layout[category].setdefault(title, ["Multiline", []])
            chart[0] = "Margin" if is_edge else chart[0]
            chart[1] = [*chart[1], TRAIN + figure.tag.format(**choice)]
    for charts in layout.values():
        for chart in charts.values():
            if chart[0] == "Multiline":  # whose tags TensorBoard reads as regular expressions
                chart[1] = [f"^{pattern_of(tag).pattern}$" for tag in chart[1]]
    return layout


class ScalarLayout(TrainerCallback):
    """Writes the layout for TensorBoard, if the run reports to it: that of `custom_scalars`, into the callback of
    TensorBoard among the trainer's `callbacks`."""

    def __init__(
        self, words: Mapping[str, Sequence[str]], banded: Sequence[str], callbacks: Sequence[TrainerCallback]
    ) -> None:
        self._layout = custom_scalars(words, banded)
        self._callbacks = callbacks

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        for callback in self._callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                with spared("TensorBoard"):
                    callback.tb_writer.add_custom_scalars(self._layout)
