"""Deltas between the learner's own exports: their layout is found, and a step of training costs little."""

import hashlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from echo2.learner.gguf_export import export_gguf  # noqa: E402
from echo2.learner.prepare import prepare  # noqa: E402
from echo2.learner.tiny import tiny_model  # noqa: E402
from echo2.learner.vocabulary import load_vocabulary  # noqa: E402
from echo2.p2p.delta import decode_delta, encode_delta  # noqa: E402
from echo2.p2p.gguf_layout import Kind, layout_of  # noqa: E402

KINDS = {"f32": Kind.F32, "f16": Kind.F16, "bf16": Kind.BF16, "q8_0": Kind.Q8_0}
MATRICES_SHARE = 0.9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    prepare("tiny", folder)
    return folder


@pytest.mark.parametrize("domain", list(KINDS))
def test_a_step_s_delta_is_small_and_gives_the_export_back(tmp_path: Path, folder: Path, domain: str) -> None:
    """In each domain the matrices are found as what they are, and weights moved by 1e-6 come back from a small delta.

    In f32 every weight's last bits change: there the delta is only smaller than the file.
    """
    vocabulary, model = load_vocabulary(folder), tiny_model()
    base = export_gguf(model, vocabulary, tmp_path / "base.gguf", domain)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-6 * torch.randn(parameter.shape, generator=generator)
    new = export_gguf(model, vocabulary, tmp_path / "new.gguf", domain)
    with new.open("rb") as file:
        spans = layout_of(file, new.stat().st_size)
    matrices = sum(span.length_bytes for span in spans if span.kind == KINDS[domain])
    assert matrices > MATRICES_SHARE * new.stat().st_size
    assert sum(span.length_bytes for span in spans) == new.stat().st_size
    encode_delta(base, new, tmp_path / "delta")
    content = new.read_bytes()
    with (tmp_path / "delta").open("rb") as file:
        sha256 = hashlib.sha256(content).digest()
        decode_delta(base, file, tmp_path / "out", sha256=sha256, length_bytes=len(content))
    assert (tmp_path / "out").read_bytes() == content
    share = (tmp_path / "delta").stat().st_size / len(content)
    assert share < {"f32": 0.45, "f16": 0.1, "bf16": 0.03, "q8_0": 0.03}[domain]
