"""For programs that use the service: publish jobs, await results, follow token streams, cancel.

`testing.FakeClient` stands in for `Client` in tests of such programs.
"""

from service.client.client import Client, ClientStats
from service.client.discover import client_settings
from service.client.lookup import Seen
from service.client.run_job import Finished, JobClient

__all__ = ["Client", "ClientStats", "Finished", "JobClient", "Seen", "client_settings"]
