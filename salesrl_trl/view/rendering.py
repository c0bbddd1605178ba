"""HTML from the templates of this room. Values are escaped, unless a template says that one is `safe`."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, **values: object) -> str:
    """The text of a template of `templates`."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    environment = Environment(loader=PackageLoader("salesrl_trl.view"), autoescape=True, undefined=StrictUndefined)
    environment.filters["kind"] = lambda value: type(value).__name__
    return environment
