"""Ids under which failed lines are run again."""

import re

from service.pipelines.batch import _retry_id
from service.wire.limits import ID_PATTERN


def test_retried_ids_of_full_length_that_differ_at_the_end_do_not_collide() -> None:
    first, second = "x" * 120 + "aaaaaaaa", "x" * 120 + "bbbbbbbb"
    ids = {_retry_id(job_id, tries) for job_id in (first, second) for tries in (2, 3, 1_000)}
    assert len(ids) == 6
    assert all(re.fullmatch(ID_PATTERN, job_id) for job_id in ids)
    assert _retry_id("short", 2) == "short:r2"
