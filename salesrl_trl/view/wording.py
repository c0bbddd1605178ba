"""Numbers and names as the report writes them, and HTML from `view/templates/`.

Owns rounding, units and the templates' environment. HTML and text show the same words because both take them here.
"""

from jinja2 import Environment, PackageLoader, StrictUndefined

_ENVIRONMENT = Environment(loader=PackageLoader("salesrl_trl.view"), autoescape=True, undefined=StrictUndefined)
_ENVIRONMENT.filters["kind"] = lambda value: type(value).__name__
NOT_KNOWN = "n/a"
NAME_CHARS = 40  # longest name that is shown. A reason code is a few words. A longer name came from elsewhere.


def shown(name: str, most: int = NAME_CHARS) -> str:
    """A name from a file: printable, on one line and not too long. The templates escape HTML."""
    text = "".join(char if char.isprintable() else "?" for char in name)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def number(value: float | None) -> str:
    """`0.412`; `n/a` for `None`."""
    return NOT_KNOWN if value is None else f"{value:.3f}"


def figure(value: float | None) -> str:
    """Three significant digits, `0.0512`; `n/a` for `None`."""
    return NOT_KNOWN if value is None else f"{value:.3g}"


def percent(value: float | None) -> str:
    """`62 %`, and `0.4 %` below 10 %."""
    if value is None:
        return NOT_KNOWN
    return f"{100 * value:.1f} %" if 0 < value < 0.0995 else f"{100 * value:.0f} %"


def seconds(value: float | None) -> str:
    """`80.5 ms`, `0.25 s`, `12.3 s`, `4 min 5 s`, `2 h 10 min`."""
    if value is None:
        return NOT_KNOWN
    if value < 0.1:
        return f"{1000 * value:.3g} ms" if value else "0 s"
    if value < 99.95:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(value / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def count(value: float) -> str:
    """`1,204`. With one decimal if it is no whole number, for example a mean over ranks."""
    return f"{value:,.0f}" if abs(value - round(value)) < 0.05 else f"{value:,.1f}"


def plural(many: float, noun: str) -> str:
    """`1 step`, `120 steps`."""
    return f"{count(many)} {noun}{'' if many == 1 else 's'}"


def render(template: str, **values: object) -> str:
    """The text of a file of `templates`. Values are escaped, unless the file says that one is `safe`."""
    return _ENVIRONMENT.get_template(template).render(values)
