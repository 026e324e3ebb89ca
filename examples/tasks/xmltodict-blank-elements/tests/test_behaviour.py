import xmltodict


def test_only_white_space_is_empty():
    assert xmltodict.parse("<root><empty> </empty></root>") == {"root": {"empty": None}}
    assert xmltodict.parse("<root>\n\t </root>") == {"root": None}


def test_text_is_stripped():
    assert xmltodict.parse("<p><name> Ada </name></p>") == {"p": {"name": "Ada"}}


def test_attributes_with_blank_content():
    assert xmltodict.parse('<a href="x"> </a>') == {"a": {"@href": "x"}}
    assert xmltodict.parse('<a href="x"> y </a>') == {"a": {"@href": "x", "#text": "y"}}


def test_kept_when_asked():
    assert xmltodict.parse("<a> b </a>", strip_whitespace=False) == {"a": " b "}
    assert xmltodict.parse("<a> </a>", strip_whitespace=False) == {"a": " "}


def test_children_and_lists():
    assert xmltodict.parse("<a> <b>1</b> <b> </b> <b>3</b> </a>") == {"a": {"b": ["1", None, "3"]}}


def test_there_and_back():
    data = {"a": {"@x": "1", "b": ["one", "two"]}}
    assert xmltodict.parse(xmltodict.unparse(data)) == data
