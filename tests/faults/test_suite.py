"""The quick part of `ops/faults`: no fault breaks a guarantee, and the judge notices when one is broken."""

import ast
import os
from pathlib import Path

import pytest

from tests.faults.harness.runs import Outcome
from tests.faults.harness.suite import Suite, Task, quick_tasks
from tests.support.kafka import KafkaBroker
from tests.support.redis import RedisServer

HARNESS = Path(__file__).parent / "harness"
OUTSIDE = ("auditor", "invariants", "ledger", "jobs")


@pytest.mark.timeout(600)
async def test_no_fault_breaks_a_guarantee(kafka: KafkaBroker, redis_session_server: RedisServer) -> None:
    del kafka, redis_session_server  # they only say here whether there are any
    seed = int(os.environ.get("FAULTS_SEED", "1"))
    wrong: list[str] = []

    def report(task: Task, outcome: Outcome) -> None:
        if task.without and not outcome.violations:
            wrong.append(f"{task.name}: nothing is violated without {task.without}")
        elif not task.without:
            wrong.extend(f"{task.name}: {each}" for each in outcome.violations)

    async with Suite(parallel=6) as suite:
        await suite.run(quick_tasks(seed), report)
    assert wrong == []


@pytest.mark.parametrize("module", OUTSIDE)
def test_the_judge_uses_nothing_of_the_product(module: str) -> None:
    tree = ast.parse((HARNESS / f"{module}.py").read_text())
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        )
    }
    assert not [name for name in imported if name.partition(".")[0] in ("service", "scheduler", "kernels")]
