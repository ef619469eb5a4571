from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.router import sse
from kvtide.router.sse import (
    EventTooLargeError,
    SseScanner,
    event_data,
    split_events,
    strip_answer,
)
from tests.router.scripted import DONE, answer_events, chunk, event

CHAT = "/v1/chat/completions"
PARAMS = {"remote_host": "10.9.8.7", "remote_block_ids": [[1, 2]]}
# Text that a model may write to look like the keys that the scanner searches for.
TRICKS = [
    '"finish_reason":"stop"',
    '{"kv_transfer_params": {"a": 1}}',
    "data: [DONE]\n\n",
    'data: {"error": {}}\n\n',
    "\r\n\r\n",
    "\\",
    "ж\u2028",
]

words = st.lists(st.sampled_from([*TRICKS, "a", "", " b "]), min_size=1, max_size=6)


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    bounds = sorted({place % (len(stream) + 1) for place in places} | {0, len(stream)})
    return [stream[a:b] for a, b in itertools.pairwise(bounds)]


def relay(parts: list[bytes]) -> tuple[bytes, SseScanner]:
    scanner = SseScanner()
    out = b"".join(scanner.feed(part) for part in parts if part)
    return out + scanner.close(), scanner


@given(words, st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
def test_without_parameters_every_byte_is_relayed_however_it_arrives(answer, places, crlf):
    """Any cut of a stream gives the same bytes, the finish reason and the end mark."""
    stream = b"".join(answer_events(CHAT, answer)) + DONE
    if crlf:
        stream = stream.replace(b"\n", b"\r\n")
    out, scanner = relay(cut(stream, places))
    assert out == stream
    assert scanner.finish_reason == "stop"
    assert scanner.done_seen
    assert not scanner.error_seen


@given(words, st.lists(st.integers(0, 10_000), max_size=12))
def test_with_parameters_only_their_event_changes_however_it_arrives(answer, places):
    """The 0.33 finish chunk loses its parameters and nothing else; the rest is as it was."""
    events = answer_events(CHAT, answer, "0.33")
    out, scanner = relay(cut(b"".join(events) + DONE, places))
    relayed = split_events(out)
    assert relayed[:-2] == events[:-1]
    assert relayed[-1] == DONE
    finish, original = (json.loads(event_data(e)) for e in (relayed[-2], events[-1]))
    original.pop("kv_transfer_params")
    assert finish == original
    assert scanner.finish_reason == "stop"


@given(st.lists(st.integers(0, 10_000), max_size=30))
def test_arbitrary_bytes_are_relayed_as_they_are(places):
    """What is no event stream at all passes unchanged, too."""
    stream = b"not an event\n\r\nnor: this\r\r\n\n\n\x00\xff\n\n: comment\n\ndata: {broken\n\ntail"
    out, scanner = relay(cut(stream, places))
    assert out == stream
    assert scanner.finish_reason == ""


def test_whole_events_are_not_held_back_nor_copied():
    """Events that arrive whole leave at once, as the very same object."""
    scanner = SseScanner()
    data = chunk(CHAT, "a") + chunk(CHAT, "b")
    assert scanner.feed(data) is data


def test_only_the_unfinished_event_is_held_back():
    """Of what arrives, all whole events leave at once."""
    scanner = SseScanner()
    first, second = chunk(CHAT, "a"), chunk(CHAT, "b")
    assert scanner.feed(first + second[:10]) == first
    assert scanner.feed(second[10:-1]) == b""
    assert scanner.feed(second[-1:]) == second


@pytest.mark.parametrize("spaced", [False, True])
def test_parameters_are_found_in_any_spelling_and_place(spaced):
    """With spaces after colons, at the top or in a choice, they go."""
    choice = {"index": 0, "finish_reason": None, "kv_transfer_params": PARAMS}
    value = {"kv_transfer_params": PARAMS, "choices": [choice]}
    data = json.dumps(value, separators=None if spaced else (",", ":")).encode()
    out, _ = relay([b"id: 7\r\ndata: " + data + b"\r\n\r\n"])
    assert b"remote_host" not in out
    assert out.startswith(b"id: 7\r\ndata: {")
    assert out.endswith(b"}\r\n\r\n")


def test_a_field_of_an_event_over_several_lines_is_one_json():
    """An event may spread its data over lines; what is re-serialised is one line again."""
    out, scanner = relay(
        [b'data: {"kv_transfer_params": {},\ndata: "choices": [{"finish_reason": "length"}]}\n\n']
    )
    assert out == b'data: {"choices":[{"finish_reason":"length"}]}\n\n'
    assert scanner.finish_reason == "length"


def test_an_event_that_names_parameters_and_cannot_be_read_is_dropped():
    """What can't be cleaned is not relayed."""
    out, _ = relay([b'data: {"kv_transfer_params": {"remote_host": \n\n', DONE])
    assert out == DONE
    out, _ = relay([b'data: {"kv_transfer_params": {"remote_host"'])
    assert out == b""


@pytest.mark.parametrize("data", [b"[1]", b'"finish_reason":"stop"', b"7"])
def test_json_that_is_no_object_passes(data):
    """Only objects are looked into."""
    stream = b"data: " + data + b"\n\n"
    assert relay([stream])[0] == stream


@pytest.mark.parametrize("choices", [None, 7, [], [7], [{"finish_reason": 7}], "x"])
def test_a_finish_chunk_of_an_unknown_shape_finishes_nothing(choices):
    """A mark without a readable choice is relayed and not believed."""
    stream = event({"choices": choices, "other": {"finish_reason": "stop"}})
    out, scanner = relay([stream])
    assert out == stream
    assert scanner.finish_reason == ""


def test_usage_counts_from_the_finish_chunk_on():
    """The usage of the last chunks is kept; earlier, continuous ones are not even parsed."""
    early = event({"choices": [{"finish_reason": None}], "usage": {"completion_tokens": 1}})
    finish = event({"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": 2}})
    last = event({"choices": [], "usage": {"completion_tokens": 3}})
    scanner = SseScanner()
    scanner.feed(early)
    assert scanner.usage is None
    scanner.feed(finish)
    assert scanner.usage == {"completion_tokens": 2}
    scanner.feed(last)
    assert scanner.usage == {"completion_tokens": 3}


def test_an_error_of_the_engine_is_noticed_and_passed_on():
    """An error event in the stream is relayed as it is."""
    stream = event({"error": {"message": "boom", "code": 500}}) + DONE
    out, scanner = relay([stream])
    assert out == stream
    assert scanner.error_seen


def test_text_about_errors_is_no_error():
    """A model may well write about errors and end marks."""
    text = '\n\ndata: {"error": 1}\n\ndata: [DONE]\n\n'
    _, scanner = relay([chunk(CHAT, text)])
    assert not scanner.error_seen
    assert not scanner.done_seen


def test_an_event_without_end_is_given_up(monkeypatch):
    """An engine can't make the router hold more than one event's worth of bytes."""
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    scanner = SseScanner()
    scanner.feed(b"data: " + b"x" * 900)
    with pytest.raises(EventTooLargeError):
        scanner.feed(b"x" * 900)


def test_split_events_loses_nothing():
    """Splitting and joining gives the stream back, an unfinished end included."""
    stream = b"a\n\nb\r\n\r\n\n\nc"
    assert b"".join(split_events(stream)) == stream
    assert split_events(b"") == []


def test_null_parameters_are_cut_out_of_an_answer_byte_for_byte():
    """The null that vLLM usually writes goes without touching any other byte."""
    body = b'{"x": 1.50,"text":"\\"kv_transfer_params\\":null","kv_transfer_params":null,"y":2}'
    stripped, answer = strip_answer(body)
    assert stripped == b'{"x": 1.50,"text":"\\"kv_transfer_params\\":null","y":2}'
    assert answer["y"] == 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params": {"remote_host": "h"}, "y": 2}',
        b'{"kv_transfer_params":null, "y": 2}',
        b'{"y": 2,"kv_transfer_params":{"remote_host":"h"}}',
        b'{"y":2, "kv_transfer_params" : {}}',
    ],
)
def test_parameters_are_stripped_from_an_answer_in_any_spelling(body):
    """Set, empty or null, first or last: they go."""
    stripped, _ = strip_answer(body)
    assert json.loads(stripped) == {"y": 2}


@pytest.mark.parametrize("body", [b"", b"oops", b"[1]", b'"x"', b'{"y": 1e400}'])
def test_an_answer_that_is_no_object_passes_as_it_is(body):
    """What can't be read is the engine's word, not the router's."""
    assert strip_answer(body) == (body, {})


def test_an_answer_without_parameters_keeps_its_bytes():
    """Nothing to strip: the very same object."""
    body = b'{"z": 1.0,  "choices": []}'
    assert strip_answer(body)[0] is body
