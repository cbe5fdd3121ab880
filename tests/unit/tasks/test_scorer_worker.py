"""Where a scorer's prints go."""

from __future__ import annotations

import os
import stat

from echo2.tasks import scorer_worker


def test_prints_go_to_a_device_where_the_null_device_has_become_a_file(tmp_path, monkeypatch):
    """The worker may write no byte to a file, so that a print would cost an honest answer its reward."""
    monkeypatch.setattr(os, "devnull", str(tmp_path / "null"))
    (tmp_path / "null").write_bytes(b"")
    null = scorer_worker._open_null()
    try:
        assert stat.S_ISCHR(os.fstat(null).st_mode)
        assert os.write(null, b"x" * 1000) == 1000
    finally:
        os.close(null)
