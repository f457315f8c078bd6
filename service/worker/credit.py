"""How many more records may be fetched: as many as can be served soon, and none while results cannot be written."""

from collections.abc import Callable

from scheduler.scheduler import Scheduler
from service.ingest.producer import ResultProducer
from service.settings import Settings
from service.stream.publisher import StreamPublisher
from service.worker.job_table import JobTable


class CreditRule:
    """Computes the credit; the consumer asks before each fetch."""

    def __init__(
        self,
        settings: Settings,
        scheduler: Scheduler,
        publisher: StreamPublisher,
        producer: ResultProducer,
        table: JobTable,
        *,
        may_open: Callable[[], bool],
    ) -> None:
        """`may_open` tells whether jobs may be opened: this deployment owns the namespace and cancellations arrive."""
        self._scheduler = scheduler
        self._publisher = publisher
        self._producer = producer
        self._table = table
        self._may_open = may_open
        self._max_jobs = settings.max_waiting + settings.max_num_seqs
        self._starved = False

    def __call__(self) -> int:
        credit = self._compute()
        self._starved = credit <= 0
        return credit

    def has_returned(self) -> bool:
        """Tell whether the last answer was 0 and would now be more. Cheap enough to call after every step."""
        return self._starved and self._compute() > 0

    def _compute(self) -> int:
        if not (self._publisher.healthy and self._producer.ready and self._may_open()):
            return 0
        credit = self._scheduler.credit()
        table = self._table
        # The scheduler does not know yet of jobs being decoded and tokenized. Any room is room for one job, however
        # large it is: an idle worker always fetches one.
        num_free = credit.requests - table.num_requests_in_intake
        by_requests = max(1, num_free // table.num_choices_expected) if num_free > 0 else 0
        by_tokens = max(1, credit.tokens // table.mean_prompt_tokens) - table.num_in_intake
        return max(0, min(by_requests, by_tokens, self._max_jobs - len(table)))
