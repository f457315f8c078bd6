"""`tailrace config`."""

from service.cli.console import print_json, print_table
from service.client.discover import client_settings
from service.settings import ENV_PREFIX, Settings, load_settings, masked


def show(*, as_json: bool) -> None:
    """Value and origin of every setting: environment, embedded pair or default."""
    from_environment = load_settings().model_fields_set
    settings = client_settings()
    shown = masked(settings)
    if as_json:
        print_json(shown)
        return
    rows = []
    for name, field in Settings.model_fields.items():
        origin = "environment" if name in from_environment else "default"
        if (
            name in ("kafka_bootstrap", "redis_url")
            and origin == "default"
            and getattr(settings, name) != field.default
        ):
            origin = "running embedded pair"
        value = shown[ENV_PREFIX + name.upper()]
        rows.append(
            (ENV_PREFIX + name.upper(), "" if value is None else value, origin, field.description or "")
        )
    print_table(("setting", "value", "from", "meaning"), rows)
