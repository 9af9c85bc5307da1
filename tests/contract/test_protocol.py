"""The document and the codec say the same: docs/protocol.md is read, its tables parsed and compared with common/wire.

Each compared table follows a comment `<!-- contract: NAME -->` in the document. A change of either side alone is red.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.limits import ERROR_TEXT_BYTES_MAX, FINGERPRINT_TEXT_BYTES_MAX, FRAME_BYTES_MAX, ROW_SECTIONS_MAX
from common.wire import attention_base_frames as pages
from common.wire import attention_extension_frames as pages_ext
from common.wire import attention_grammar, frames, grammar, rows
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.layout import Layout

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()

RECORDS = {
    "header": frames.HEADER,
    "ext_hdr": frames.EXT_HDR,
    "hello_req": base.Hello.LAYOUT,
    "hello_req2": base.Hello2.LAYOUT,
    "hello_rep": base.HelloOk.LAYOUT,
    "hello_rep2": base.HelloOk2.LAYOUT,
    "chunk_req": base.Chunk.LAYOUT,
    "chunk_rep": base.ChunkAck.LAYOUT,
    "ping": base.Ping.LAYOUT,
    "trim": base.Trim.LAYOUT,
    "sync_req": base.Sync.LAYOUT,
    "ok": base.Ok.LAYOUT,
    "range_req": base.StateRange.LAYOUT,
    "hello3": ext.Hello3.LAYOUT,
    "chunk2_ack": ext.Chunk2Ack.LAYOUT,
    "ok2": ext.Ok2.LAYOUT,
    "state_data2": ext.StateData2.LAYOUT,
    "snapshot": ext.Snapshot.LAYOUT,
    "err2": ext.Err2.LAYOUT,
    "pages_hello": pages.HelloOk.LAYOUT,
    "config": pages.Config.LAYOUT,
    "append": pages.Append.LAYOUT,
    "truncate": pages.Truncate.LAYOUT,
    "attn": pages.Attn.LAYOUT,
    "attn_rep": pages.AttnOk.LAYOUT,
    "pages_ping": pages.Ping.LAYOUT,
    "fetch": pages.Fetch.LAYOUT,
    "config2": pages_ext.Config2.LAYOUT,
    "config2_ok": pages_ext.Config2Ok.LAYOUT,
    "append2": pages_ext.Append2.LAYOUT,
    "pages_ok2": pages_ext.Ok2.LAYOUT,
    "attn2": pages_ext.Attn2.LAYOUT,
    "attn2_ok": pages_ext.Attn2Ok.LAYOUT,
    "fetch2": pages_ext.Fetch2.LAYOUT,
    "rows_head": rows.ROWS_HEAD,
    "rows_section": rows.ROWS_SECTION,
}
NO_RECORD = {
    *("-", "residual", "blob", "text", "bytes", "logits f32"),
    *("rows", "queries", "results", "layers", "piece"),
}
BLOCKS = ["header", "residual records", "attention records", "rows records"]
RULES = [grammar.RESIDUAL_RULES, attention_grammar.ATTENTION_RULES]
PREFIX = {"residual": "", "attention": "attention "}
"""Of a channel's tables of grammar and answers."""
each_channel = pytest.mark.parametrize("rules", RULES, ids=lambda rules: rules.channel.name)


def part(name: str) -> str:
    """The table or code block after this contract comment."""
    match = re.search(rf"<!-- contract: {name} -->\n(.*?)\n\n", DOCUMENT + "\n\n", re.DOTALL)
    assert match, f"docs/protocol.md has no part {name!r}"
    if match[1].startswith("```"):
        return re.search(rf"<!-- contract: {name} -->\n```\n(.*?)```", DOCUMENT, re.DOTALL)[1]
    return match[1]


def table(name: str) -> list[list[str]]:
    """Rows of a table without its two head lines, cells stripped."""
    lines = part(name).splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def records(name: str) -> dict[str, tuple[int, str]]:
    """name -> (size, line of fields) of a block of records; a record used as a field is spelled out."""
    found: dict[str, tuple[int, str]] = {}
    text = re.sub(r",\n\s+", ", ", part(name))
    for line in filter(None, text.splitlines()):
        key, size, fields = re.match(r"(\w+)\s+\((\d+) B\)\s+(.*)", line).groups()
        pieces = [found[piece][1] if piece in found else piece for piece in fields.split(", ")]
        found[key] = (int(size), ", ".join(pieces))
    return found


@pytest.mark.parametrize("block", BLOCKS)
def test_records_are_the_layouts(block):
    for name, (size, line) in records(block).items():
        assert line == RECORDS[name].line, name
        assert size == RECORDS[name].size == Layout(line).size, name


def test_every_record_is_documented():
    documented = {name for block in BLOCKS for name in records(block)}
    assert documented == set(RECORDS)


def test_channels_and_ports():
    found = {row[0]: row for row in table("channels")}
    for channel in (frames.RESIDUAL, frames.ATTENTION):
        magic, port = found[channel.name][1], found[channel.name][2]
        number, letters = re.match(r'`(0x[0-9A-F]+)` "(\w+)"', magic).groups()
        assert int(number, 16) == channel.magic
        assert channel.magic.to_bytes(4, "little") == letters.encode()
        assert int(port) == channel.port
    assert int(found["control"][2]) == frames.CONTROL_PORT
    assert len(found) == 3


@pytest.mark.parametrize("channel", [frames.RESIDUAL, frames.ATTENTION], ids=lambda channel: channel.name)
def test_type_numbers(channel):
    assert {row[1]: int(row[0]) for row in table(f"{channel.name} types")} == channel.types


@each_channel
def test_payloads_and_longest_payloads(rules):
    for number, name, payload, longest in table(f"{rules.channel.name} types"):
        classes = rules.channel.frames[int(number)]
        alternatives = payload.split(" or ")
        assert len(classes) == len(alternatives)
        for cls, text in zip(classes, alternatives, strict=True):
            assert name == cls.NAME
            pieces = text.split(", ")
            assert (pieces[0] == "ext_hdr") == (cls.TYPE >= frames.EXTENSION_TYPE_MIN), name
            named = [piece for piece in pieces if piece not in NO_RECORD and piece != "ext_hdr"]
            assert [RECORDS[piece].line for piece in named] == (
                [cls.LAYOUT.line] if cls.LAYOUT.size else []
            ), name
            rest = [piece for piece in pieces if piece in NO_RECORD and piece != "-"]
            assert bool(rest) == bool(cls.REST), name
            assert ("text" in rest) == (cls.REST == "text"), name
        total = sum(
            int(term.removesuffix(" MiB")) << (20 if "MiB" in term else 0) for term in longest.split(" + ")
        )
        assert total == max(cls.BYTES_MAX for cls in classes), name


@each_channel
def test_every_type_has_its_frame(rules):
    assert set(rules.channel.frames) == set(rules.channel.types.values())


@each_channel
def test_grammar(rules):
    written = table(f"{PREFIX[rules.channel.name]}grammar")
    for phase_text, *cells in written:
        phase = grammar.Phase(phase_text)
        for role, cell in zip((grammar.Role.HOST, grammar.Role.WORKER), cells, strict=True):
            said = {}
            for item in filter(None, cell.split(", ")):
                name, _, following = item.partition(" → ")
                said[name] = grammar.Phase(following) if following else phase
            coded = {cls.NAME: to for (who, cls), to in rules.grammar[phase].items() if who is role}
            assert said == coded, (phase_text, role)
    assert {row[0] for row in written} == {phase.value for phase in grammar.Phase} - {"closed"}
    assert rules.grammar[grammar.Phase.CLOSED] == {}


@each_channel
def test_answers(rules):
    documented = dict(table(f"{PREFIX[rules.channel.name]}answers"))
    assert documented == {ask.NAME: answer.NAME for ask, answer in rules.answers.items()}


@pytest.mark.parametrize(
    ("sentence", "value"),
    [
        ("Base protocol: version {} of the residual", base.PROTO),
        ("Extension: version {}.", ext.EXTENSION_VERSION),
        ("The bound for everything is {} MiB", FRAME_BYTES_MAX >> 20),
        ("At most {:,} sections", ROW_SECTIONS_MAX),
        ("`state_format` | `0x{:08X}`", base.STATE_FORMAT_ROWS),
        ("`magic` is `0x{:08X}`", rows.ROWS_MAGIC),
        ("A chunk of up to {:,} tokens", 4096),
        ("24 + 156 + {}", FINGERPRINT_TEXT_BYTES_MAX),
        ("24 + 16 + {}", ERROR_TEXT_BYTES_MAX),
    ],
)
def test_numbers_in_the_prose(sentence, value):
    assert sentence.format(value) in DOCUMENT


def test_bits_are_what_the_document_says():
    from common.wire import messages

    assert (messages.WANT_LOGITS, messages.WANT_TAPS, messages.WANT_ROWS, messages.WANT_STATE) == (1, 2, 4, 8)
    assert (messages.ROWS_KV, messages.ROWS_STATE) == (1, 2)
    assert (base.DTYPE_F32, base.DTYPE_F16) == (0, 1)
    assert (ext.FEATURE_ROW_STATE, ext.FEATURE_SNAPSHOTS, ext.FEATURE_F32_PARTIALS) == (1, 2, 4)
    assert (rows.KIND_K, rows.KIND_V, rows.KIND_CONV, rows.KIND_RECURRENT) == (0, 1, 2, 3)
