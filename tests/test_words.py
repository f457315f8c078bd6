"""One word per thing: no name, comment or document uses a word that the glossary has retired."""

import io
import re
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "ops" / "glossary.md"
NOT_YET_RETIRED = ROOT / "tests" / "retired_words.toml"
"""Files that still use a retired word, by word. To be shortened, never to be extended."""

PROSE = (tokenize.COMMENT, tokenize.STRING)
Uses = dict[str, set[str]]


def retired(kind: str) -> frozenset[str]:
    """The words of the glossary behind `Not: …` or `Not the name: …`."""
    lists = re.findall(rf"{kind}: ([^.]+)\.$", GLOSSARY.read_text(), re.MULTILINE)
    return frozenset(word.strip() for found in lists for word in found.split(","))


def sources() -> Iterator[Path]:
    for package in ("scheduler", "kernels", "service"):
        yield from (ROOT / package).rglob("*.py")


def documents() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from (
        path for path in (ROOT / "ops").rglob("*.md") if path != GLOSSARY and path.parent.name != "samples"
    )


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@cache
def text_of(path: Path) -> str:
    """A file in small letters, CamelCase as snake_case; of Python only identifiers, strings and comments."""
    text = re.sub(r"\.digest\(\)|\bdigest_size\b", "", path.read_text())  # hashlib's own words
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        text = " ".join(token.string for token in tokens if token.type in (tokenize.NAME, *PROSE))
    else:
        text = re.sub(r"`[^`]*`", "", text)  # names of code are judged where they are defined
    return snake(text)


@cache
def words_of(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"[^\W_]+", text_of(path)))


def uses_in_text() -> Uses:
    found: Uses = defaultdict(set)
    for path in (*sources(), *documents()):
        for word in retired("Not"):
            # Of two words joined by an underscore only the name is retired: "sampled rows" is plain English.
            if word in (text_of(path) if "_" in word else words_of(path)):
                found[word].add(str(path.relative_to(ROOT)))
    return found


def uses_as_name() -> Uses:
    found: Uses = defaultdict(set)
    for path in sources():
        classes = re.findall(r"^ *class (\w+)", path.read_text(), re.MULTILINE)
        for name in {path.stem, *map(snake, classes)} & retired("Not the name"):
            found[name].add(str(path.relative_to(ROOT)))
    return found


def test_retired_words_are_gone() -> None:
    allowed = {word: set(files) for word, files in tomllib.loads(NOT_YET_RETIRED.read_text()).items()}
    used = uses_in_text() | uses_as_name()
    new = {word: sorted(used[word] - allowed.get(word, set())) for word in used}
    assert {word: files for word, files in new.items() if files} == {}, (
        "these use a word that the glossary retired"
    )
    gone = {word: sorted(files - used.get(word, set())) for word, files in allowed.items()}
    assert {word: files for word, files in gone.items() if files} == {}, (
        f"take these out of {NOT_YET_RETIRED.name}"
    )


def test_words_are_found_wherever_they_stand() -> None:
    assert snake("HopelessPolicy.EXPIRE") == "hopeless_policy.expire"
    assert {"seat", "whoever"} <= retired("Not")
    assert retired("Not") & retired("Not the name") == frozenset()
