"""Lines in chunks, in order, through several processes."""

import os
import time

import pytest

from powernorm_fairseq.corpora import counts, streams
from powernorm_fairseq.corpora.catalogue import CATALOGUE, readable_size
from powernorm_fairseq.processes import UserError


def late_first(number):
    time.sleep(0.05 if number == 0 else 0.0)
    return number * number


def die(number):
    if number == 3:
        os._exit(1)
    return number


def fail(number):
    raise UserError(f"bad {number}")


@pytest.mark.parametrize("workers", [1, 2])
def test_in_order_and_not_far_ahead(workers):
    read = []

    def items():
        for number in range(40):
            read.append(number)
            yield number

    for expected, (item, result) in enumerate(streams.in_order(late_first, items(), workers)):
        assert (item, result) == (expected, expected * expected)
        assert len(read) <= expected + 3 * workers
    assert len(read) == 40


def test_errors_of_workers_and_their_death_are_reported():
    with pytest.raises(UserError, match="bad 0"):
        list(streams.in_order(fail, range(5), 2))
    with pytest.raises(UserError, match="worker process was killed"):
        list(streams.in_order(die, range(20), 2))


def test_lines_are_counted_as_they_are_read(tmp_path):
    path = tmp_path / "text"
    for content, lines in (
        (b"", []),
        (b"a", ["a"]),
        (b"a\n\nb\n", ["a", "", "b"]),
        (b"a\rb\x0c\n\xe2\x80\xa8c", ["a\rb\x0c", "\u2028c"]),
        (b"a\xff\n", ["a\ufffd"]),
    ):
        path.write_bytes(content)
        assert list(streams.lines_of(path)) == lines
        assert streams.count_lines(path) == len(lines)
    assert list(streams.in_chunks(range(5), 2)) == [[0, 1], [2, 3], [4]]


def test_progress_says_rate_and_what_is_left(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(streams.time, "monotonic", lambda: now[0])
    progress = streams.Progress("words", 10_000, said.append)
    for second in range(25):
        now[0] = float(second)
        progress.add(100)
    assert said == [
        "words: 1,100 of 10,000, 110 a second, 81 s left",
        "words: 2,100 of 10,000, 105 a second, 75 s left",
    ]
    said.clear()
    for total, whole in ((0, ""), (4_000_000, " of 4.0 MB")):
        now[0] = 0.0
        progress = streams.Progress("a", total, said.append, written=readable_size)
        now[0] = 20.0
        progress.add(2_000_000)
        assert said.pop() == f"a: 2.0 MB{whole}, 100.0 kB a second" + (", 20 s left" if total else "")
    assert [streams.duration(seconds) for seconds in (90, 600, 9000)] == ["90 s", "10 min", "2.5 h"]


def test_counts_are_compared_with_what_is_known():
    said = []
    data = CATALOGUE["iwslt15-en-vi"]
    known = {count.of: count.value for count in data.counts}
    assert counts.compare(data, {"test pairs": 1268, "something else": 1}, said.append)
    assert said == ["as known: test pairs"]
    said.clear()
    assert not counts.compare(data, {**known, "train pairs": 100, "valid pairs": 7}, said.append)
    assert said[0].startswith("note: train pairs: 100 here, 133,317 as recalled")
    assert said[1].startswith("WARNING: valid pairs: 7 here, 1,553 known from public READMEs")
    assert len(said) == 2


def test_counts_are_kept_with_the_text(tmp_path):
    assert counts.read_counts(tmp_path) == {}
    counts.write_counts(tmp_path, {"train pairs": 3})
    assert counts.read_counts(tmp_path) == {"train pairs": 3}
