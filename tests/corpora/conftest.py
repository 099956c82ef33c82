"""Fixtures for downloads from a server on this machine."""

import pytest

from powernorm_fairseq.corpora.catalogue import File
from powernorm_fairseq.corpora.download import fetch
from tests.corpora.servers import QUICK, RIGHT, Server


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    running = Server()
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture
def said():
    return []


@pytest.fixture
def get(server, tmp_path, said):
    """Fetch what is under ``paths``, in turn."""

    def get(*paths, checksums=RIGHT, name="a.tgz", manner=QUICK, **fields):
        addresses = tuple(path if "://" in path else server.address(path) for path in paths)
        return fetch(File(name, addresses, checksums=checksums, **fields), tmp_path, manner, said.append)

    return get
