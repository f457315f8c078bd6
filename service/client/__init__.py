"""For programs that use the service: publish jobs, await results, follow token streams, cancel."""

from service.client.client import Client, Finished
from service.client.discover import client_settings

__all__ = ["Client", "Finished", "client_settings"]
