"""Finds Kafka and Redis: at given addresses, where the environment says, or as a running embedded pair."""

import os

from service.embedded import announcements
from service.settings import ENV_PREFIX, Settings, changed, load_settings


def client_settings(
    *, bootstrap: str | None = None, redis_url: str | None = None, namespace: str | None = None
) -> Settings:
    """Returns the settings of the environment, with the arguments in place of what it says.

    If neither names Kafka or Redis, a running embedded pair of the same user is used. Naming one of the two is enough
    to ignore the pair: another Kafka does not fit an embedded Redis. Raises SettingsError.
    """
    given = {"KAFKA_BOOTSTRAP": bootstrap, "REDIS_URL": redis_url, "NAMESPACE": namespace}
    overrides = {ENV_PREFIX + name: value for name, value in given.items() if value is not None}
    settings = load_settings(os.environ | overrides if overrides else None)
    if settings.model_fields_set & {"kafka_bootstrap", "redis_url"}:
        return settings
    running = announcements.find_running()
    if running is None:
        return settings
    return changed(settings, kafka_bootstrap=running.kafka_bootstrap, redis_url=running.redis_url)
