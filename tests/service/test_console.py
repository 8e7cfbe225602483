"""What a person sees of a reply."""

import json
import shlex

import pytest
import typer

from export.contract import UserError
from service.commands import _read_addresses, _read_feature
from service.console import Answer, ask, curl_line, render_table

REPLY = {
    "version": 3,
    "embeddings": {"user": [[[0.5, None], [1.0, 2.0]], []], "both@item": [[], [[-1.0, 0.25]]]},
    "row_ids": {"user": [[9, 4], []], "both@item": [[], [2]]},
    "hits": {"user": [[True, False], []], "both@item": [[], [True]]},
}
FEATURES = {"user": [[77, 2**63 - 1], []], "both": [[], [-5]]}


def test_the_table_has_a_line_for_each_id_with_its_row_and_whether_it_is_known():
    text = render_table(Answer(features=FEATURES, text="", reply=REPLY))
    lines = [line for line in text.splitlines() if "│" in line]
    assert len(lines) == 3
    for line, words in zip(
        lines,
        [("user", "77", "9", "yes", "NaN"), ("9223372036854775807", "4", "no"), ("both@item", "-5", "2", "-1.0000")],
        strict=True,
    ):
        assert all(word in line for word in words), line


def test_the_curl_line_says_the_same_to_a_shell():
    words = shlex.split(curl_line("http://h:1/", "clicks", FEATURES))
    assert words[2] == "http://h:1/v1/collections/clicks:lookup"
    assert json.loads(words[-1])["features"] == FEATURES


@pytest.mark.parametrize(
    ("text", "feature"),
    [("user=1,2", ("user", [[1, 2]])), ("user=1;;-3, 4", ("user", [[1], [], [-3, 4]])), ("user=", ("user", [[]]))],
)
def test_ids_are_read_sample_by_sample(text, feature):
    assert _read_feature(text) == feature


@pytest.mark.parametrize("text", ["user", "user=x", "user=1.5", "user=1;a"])
def test_what_is_no_list_of_ids_is_said(text):
    with pytest.raises(typer.BadParameter, match="write NAME=1,2"):
        _read_feature(text)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:65536", "host:x", "a:1,,b:2"])
def test_what_is_no_list_of_addresses_is_said(text):
    with pytest.raises(typer.BadParameter, match="HOST:PORT"):
        _read_addresses(text)


def test_addresses_are_read_in_their_order():
    assert _read_addresses("a:1, b.c.svc:65535,[::1]:80") == ["a:1", "b.c.svc:65535", "[::1]:80"]


def test_nobody_there_is_said_with_what_to_do():
    with pytest.raises(UserError, match="kjtserve serve"):
        ask("http://127.0.0.1:1", "clicks", FEATURES, timeout_s=1)
