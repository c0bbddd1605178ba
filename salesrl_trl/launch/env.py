"""`salesrl env`: the code and versions of a run here, the differences of two runs, or whether the code contains a
change. Exit code: 0; 1 if the runs differ or lack the change; 2 for invalid input, or if it can't be determined."""

import platform
import sys
from collections.abc import Sequence

from salesrl_trl.errors import ConfigError
from salesrl_trl.ground import own_code, versions
from salesrl_trl.ground.command_line import ended, parser_of
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.launch import software
from salesrl_trl.launch.run_record import differences, settings_text


def page() -> str:
    code = own_code.code()
    lines = [
        ("package", f"salesrl_trl {code} in {own_code.PACKAGE}"),
        ("code", f"{code.digest} (hash of all files)"),
        ("python", f"{platform.python_version()}, {sys.executable}"),
        ("platform", platform.platform()),
        *(("GPU", ", ".join(gpu.values())) for gpu in software.gpus() or [{"": "none (nvidia-smi shows none)"}]),
        *(("version", _version(package)) for package in versions.packages()),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def _version(package: versions.Package) -> str:
    extra = f", for the extra {package.extra}" if package.extra else ""
    if package.is_met:
        return f"{package.name} {package.installed or 'is not installed'} ({package.wanted}{extra})"
    return f"NOT MET: {package.name} {package.wanted} is required{extra}, installed: {package.installed}"


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return ended(argv, lambda: _show(argv))


def _show(argv: Sequence[str]) -> int:
    options, settings = parser_of("env").parse_known_args(argv)
    if settings and (options.diff or options.has):
        raise ConfigError("`--diff` and `--has` accept no settings.")
    if options.has:
        has = own_code.holds(options.has)
        print(f"{options.has} is {'' if has else 'NOT '}in the code of {own_code.PACKAGE}, {own_code.code()}")
        return int(not has)
    if options.diff:
        changes = differences(*options.diff)
        for part, values in changes.items():
            for name, (first, other) in values.items():
                print(f"{part}: {name}: {first} -> {other}")
        return int(any(changes.values()))
    print(page())
    if settings:
        from salesrl_trl.launch.settings import parse

        print(f"\n{settings_text(parse(settings, None).recipe)}")
    return 0


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
