"""Where Kafka and Redis are: what the environment says, or a running embedded pair of the same user."""

from service.embedded import announcements
from service.settings import Settings, load_settings


def client_settings() -> Settings:
    """Settings of the environment; if it names neither Kafka nor Redis, a running embedded pair is used.

    Naming one of the two is enough to be left alone: a Kafka of one's own does not go with an embedded Redis.
    """
    settings = load_settings()
    if settings.model_fields_set & {"kafka_bootstrap", "redis_url"}:
        return settings
    running = announcements.find_running()
    if running is None:
        return settings
    return settings.model_copy(
        update={"kafka_bootstrap": running.kafka_bootstrap, "redis_url": running.redis_url}
    )
