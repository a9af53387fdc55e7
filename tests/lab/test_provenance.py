"""Provenance of a result: the commit."""

from nero_lab import provenance


def test_commit_of_another_repository_is_none(monkeypatch):
    monkeypatch.delenv("NERO_COMMIT", raising=False)
    answers = {"rev-parse": "somewhere/else", "describe": "abc"}
    monkeypatch.setattr(provenance, "_git", lambda _, command, *__: answers[command])
    assert provenance.commit() is None
    monkeypatch.setattr(provenance, "_git", lambda *_: None)
    assert provenance.commit() is None


def test_commit_from_the_environment_takes_precedence(monkeypatch):
    monkeypatch.setenv("NERO_COMMIT", "given")
    assert provenance.commit() == "given"
