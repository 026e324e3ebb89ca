import pytest
import tomlkit
from tomlkit.exceptions import NonExistentKey

SCATTERED = """[tool.x.deps]
a = 1

[other]
o = 1  # stays

[tool.x.scripts]
s = 2

[tool.y]
k = 1
"""


def test_nothing_is_left_in_the_text():
    doc = tomlkit.parse(SCATTERED)
    del doc["tool"]["x"]
    assert tomlkit.parse(tomlkit.dumps(doc)).unwrap() == {"other": {"o": 1}, "tool": {"y": {"k": 1}}}
    assert "[tool.x" not in tomlkit.dumps(doc)
    assert "o = 1  # stays" in tomlkit.dumps(doc)


def test_three_places():
    text = SCATTERED + "\n[last]\nl = 1\n\n[tool.x.more]\nm = 3\n"
    doc = tomlkit.parse(text)
    del doc["tool"]["x"]
    assert tomlkit.parse(tomlkit.dumps(doc)).unwrap() == {"other": {"o": 1}, "tool": {"y": {"k": 1}}, "last": {"l": 1}}


def test_a_key_in_one_place():
    doc = tomlkit.parse(SCATTERED)
    del doc["tool"]["y"]
    assert tomlkit.parse(tomlkit.dumps(doc)).unwrap() == {
        "other": {"o": 1},
        "tool": {"x": {"deps": {"a": 1}, "scripts": {"s": 2}}},
    }


def test_two_deletions():
    doc = tomlkit.parse(SCATTERED + "\n[last]\nl = 1\n\n[tool.z]\nq = 1\n")
    del doc["tool"]["x"]
    del doc["tool"]["z"]
    assert tomlkit.parse(tomlkit.dumps(doc)).unwrap() == {"other": {"o": 1}, "tool": {"y": {"k": 1}}, "last": {"l": 1}}


def test_missing_key():
    doc = tomlkit.parse(SCATTERED)
    with pytest.raises(NonExistentKey):
        del doc["tool"]["nothing"]


def test_unchanged_text_is_kept():
    assert tomlkit.dumps(tomlkit.parse(SCATTERED)) == SCATTERED
