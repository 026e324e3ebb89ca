import pytest
from pyparsing import ParseException, Word, alphas, nums


def match(word, text):
    try:
        return word.parse_string(text)[0]
    except ParseException:
        return None


@pytest.mark.parametrize("least", [2, 3, 5])
def test_shorter_words_do_not_match(least):
    digits = "1" * (least - 1)
    assert match(Word(nums, min=least), digits) is None
    assert match(Word(nums, min=least), digits + "1") == digits + "1"
    assert match(Word(nums, min=least), digits + "1234") == digits + "1234"


@pytest.mark.parametrize("least", [2, 3, 5])
def test_other_characters_after_the_first(least):
    word = Word(alphas, nums, min=least)
    assert match(word, "a" + "1" * (least - 2)) is None
    assert match(word, "a" + "1" * (least - 1)) == "a" + "1" * (least - 1)
    assert match(word, "a123456789") == "a123456789"


def test_without_minimum():
    assert match(Word(nums), "1") == "1"
    assert match(Word(alphas, nums), "a") == "a"
    assert match(Word(alphas, nums), "1") is None


def test_minimum_and_maximum():
    word = Word(nums, min=2, max=3)
    assert [match(word, "1" * n) for n in range(1, 4)] == [None, "11", "111"]
    both = Word(alphas, nums, min=2, max=4)
    assert [match(both, text) for text in ("a", "a1", "a123")] == [None, "a1", "a123"]


def test_exact():
    assert match(Word(nums, exact=3), "12") is None
    assert match(Word(nums, exact=3), "123") == "123"


def test_in_a_grammar():
    assert Word(nums, min=2)[1, ...].parse_string("12 345 6").as_list() == ["12", "345"]
