"""The README's client example runs against the fake client."""

import inspect
import re
from pathlib import Path

import pytest

from service.client import Client
from service.client.testing import FakeClient

README = (Path(__file__).resolve().parents[3] / "README.md").read_text()
SECTION = README.split("## Use the Python client\n")[1].split("\n## ")[0]


def run_example(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the example with the fake client that the section shows, made with the function `answer`."""

    def fake(**addresses: str) -> FakeClient:
        inspect.signature(Client).bind(**addresses)
        return FakeClient(eval(answer))

    monkeypatch.setattr("service.client.Client", fake)
    code = SECTION.split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def test_the_example_prints_the_events_and_the_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = re.search(r"async with FakeClient\((.+)\) as client`", SECTION)
    assert shown is not None
    run_example(shown[1], monkeypatch)
    start, *_, outcome = capsys.readouterr().out.splitlines()
    assert start.startswith("Start(")
    assert outcome == str(("completed", ("about Why does a water wheel need a tailrace?",)))
