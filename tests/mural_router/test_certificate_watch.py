"""Certificates that are renewed under a running router."""

from __future__ import annotations

from mural_router.certificates import CertificateWatch
from mural_router.http.settings import TlsSettings


def files(tmp_path):
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    cert.write_text("old")
    key.write_text("old")
    return cert, key, TlsSettings(certfile=str(cert), keyfile=str(key))


def test_a_renewed_pair_is_read_once_it_has_settled(tmp_path):
    cert, key, tls = files(tmp_path)
    loaded: list[tuple[str, str]] = []
    watch = CertificateWatch(tls, lambda: loaded.append((cert.read_text(), key.read_text())))
    watch.poll()
    cert.write_text("renewed")
    watch.poll()
    key.write_text("renewed")
    watch.poll()
    assert loaded == []
    watch.poll()
    watch.poll()
    assert loaded == [("renewed", "renewed")]


def test_files_that_do_not_fit_leave_the_old_ones_until_they_change_again(tmp_path, caplog):
    cert, _, tls = files(tmp_path)
    calls: list[str] = []

    def reload() -> None:
        calls.append(cert.read_text())
        if calls[-1] == "broken":
            raise ValueError("the key is another's")

    watch = CertificateWatch(tls, reload)
    for text in ("broken", "renewed"):
        cert.write_text(text)
        for _ in range(3):
            watch.poll()
    assert calls == ["broken", "renewed"]
    assert "refused" in caplog.text


def test_without_tls_there_is_nothing_to_watch():
    assert not CertificateWatch(TlsSettings(), lambda: None).needed
