"""Tests for the sentences of posts, against lines that TFF publishes of its data."""

import time

import pytest

from simulation.sources import sentence

# What tff.simulation.datasets.stackoverflow.get_synthetic has, and what it came from.
TFF_LINES = [
    (
        "If you're using SQL 2005 or better this is a nice, simple-ish median "
        "calculation for a single column in a table:",
        "if you're using sql 2005 or better this is a nice , simple-ish median "
        "calculation for a single column in a table :",
    ),
    (
        "Which is exactly how you'd want it to work.",
        "which is exactly how you'd want it to work .",
    ),
    (
        "Iterator pattern in VB.NET (C# would use yield!)",
        "iterator pattern in vb . net ( c # would use yield ! )",
    ),
    (
        "Writing to /system/framework in emulator",
        "writing to / system / framework in emulator",
    ),
]


@pytest.mark.parametrize(("text", "expected"), TFF_LINES)
def test_tokens_are_those_of_tff(text, expected):
    assert " ".join(sentence.tokenize(text)) == expected
    # Splitting at spaces alone is another answer.
    assert text.lower().split() != expected.split()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("See https://a.org/b?c=1#d.", ["see", "<URL>", "."]),
        ("(HTTP://A.ORG)", ["(", "<URL>", ")"]),
        ("www.a.org, ftp://b", ["<URL>", ",", "<URL>"]),
        # What only looks like the token for links is text.
        ("<URL>", ["<", "url", ">"]),
        ("httpd: a www site", ["httpd", ":", "a", "www", "site"]),
    ],
)
def test_links_are_one_token(text, expected):
    assert sentence.tokenize(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("caf\u00e9 \u2014 na\u00efve", ["caf", "nave"]),
        ("a\u00a0b\u2003c", ["a", "b", "c"]),
        ("\u212aelvin", ["elvin"]),
        ("snake_case...", ["snake", "_", "case", ".", ".", "."]),
        ("  \t\n", []),
        ("\u65e5\u672c", []),
        ("a\x00b\x07", ["a", "b"]),
    ],
)
def test_only_ascii_stays(text, expected):
    assert sentence.tokenize(text) == expected


def extract(body: str) -> list[str]:
    return [" ".join(tokens) for tokens in sentence.extract_sentences(body)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("<p>One. Two!  Three?</p>", ["one .", "two !", "three ?"]),
        ("<p>One</p><p>two</p>", ["one", "two"]),
        ("<p>One\nline</p>", ["one line"]),
        ("<ul><li>one</li><li>two</li></ul>", ["one", "two"]),
        ("one<br>two<br/>three", ["one", "two", "three"]),
        ("<p>a &lt;b&gt; &amp;amp; c</p>", ["a < b > & amp ; c"]),
        ("<p>Use <b>bo</b>ld.</p>", ["use bold ."]),
        (
            "<p>It is, e.g., Foo, i.e. Bar.</p>",
            ["it is , e . g . , foo , i . e . bar ."],
        ),
        ("<p>By W. Foo. 1. In case</p>", ["by w . foo .", "1 . in case"]),
        ("<p>Version 2.0 is out. it works</p>", ["version 2 . 0 is out . it works"]),
        ('<p>"Yes." (No!) Well</p>', ['" yes . "', "( no ! )", "well"]),
        ("<p>So... What?! Ok</p>", ["so . . .", "what ? !", "ok"]),
        ("", []),
        ("<p> </p><p>\u65e5\u672c</p>", []),
    ],
)
def test_sentences(body, expected):
    assert extract(body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("<p>a <code>x = 1</code> b</p>", ["a b"]),
        ("<p>a<code>x</code>b</p>", ["a b"]),
        ("a<pre><code>x\n</code></pre>b", ["a", "b"]),
        ("a<pre>x<code>y</code>z</pre>b", ["a", "b"]),
        ("a</code>b", ["ab"]),
        ("a<code>x", ["a"]),
    ],
)
def test_code_is_left_out(body, expected):
    assert extract(body) == expected


def test_a_declaration_that_no_parser_reads_is_an_error():
    with pytest.raises(ValueError, match="the text must be HTML"):
        sentence.extract_sentences("<p>a<![what[b]]></p>")


@pytest.mark.parametrize("piece", ["!", "!)", "www.", "http://.", "<", "&", "a. "])
def test_the_time_is_linear_in_the_length(piece):
    start = time.perf_counter()
    sentence.extract_sentences(piece * 30_000)
    # A quadratic reading takes above 10 s.
    assert time.perf_counter() - start < 5
