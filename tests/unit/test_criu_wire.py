"""CRIU's wire format, the seal of images, and which TCP connections lead outside."""

from __future__ import annotations

import socket

import pytest

from snapshot_drivers.criu import rpc
from snapshot_drivers.criu.driver import CriuDriver
from snapshot_drivers.criu.tcp import Connection, outside
from snapshot_drivers.errors import UnsupportedHost
from snapshot_drivers.registry import make_driver

MAPPED = "0000000000000000FFFF0000"


def test_a_request_is_what_protobuf_would_write() -> None:
    assert rpc.request(rpc.Kind.DUMP, {"pid": 300, "images_dir": "x"}) == bytes.fromhex("0801120710ac02a2040178")
    assert rpc.request(rpc.Kind.VERSION) == b"\x08\x0a"
    assert rpc.request(rpc.Kind.CHECK, {"images_dir_fd": -1})[4:] == b"\x08" + b"\xff" * 9 + b"\x01"


def test_an_answer_is_read_and_rubbish_is_refused() -> None:
    said = rpc.answer(bytes.fromhex("080610012a0b0a09") + b"post-dump")
    assert (said.kind, said.success, said.script) == (rpc.Kind.NOTIFY, True, "post-dump")
    for rubbish in (b"\x2a\x7fx", b"\x08", b"\x0d", b"\x08" + b"\xff" * 20):
        with pytest.raises(ValueError):
            rpc.answer(rubbish)


def test_a_pair_inside_is_not_outside_also_through_a_mapped_address() -> None:
    inner = [
        Connection(socket.AF_INET, "0100007F:2328", "0100007F:A000", 1),
        Connection(
            socket.AF_INET6, "0000000000000000FFFF00000100007F:A000", "0000000000000000FFFF00000100007F:2328", 1
        ),
    ]
    out = Connection(socket.AF_INET, "020011AC:A001", "01010101:01BB", 1)
    assert outside([*inner, out]) == [out]


def test_unknown_options_and_values_are_refused(tmp_path: object) -> None:
    from pathlib import Path

    store = Path(str(tmp_path)) / "store"
    for options in ({"requires": "all"}, {"require": "some"}, {"tcp": True}, {"timeout_s": 0}, {"timeout_s": "5"}):
        with pytest.raises(UnsupportedHost):
            make_driver("criu", store, options)
    driver = make_driver("criu", store, {"require": "all", "clock": "host", "tcp": "close", "timeout_s": 3})
    assert isinstance(driver, CriuDriver)
    driver.close()
