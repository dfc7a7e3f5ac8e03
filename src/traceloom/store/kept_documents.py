"""What operators write, kept in all its versions: rules of owners, prices."""

from __future__ import annotations

from typing import Literal, NamedTuple

from traceloom.store.database import StateDatabase

DocumentName = Literal["owners", "prices"]


class KeptDocument(NamedTuple):
    """A version of a document, from 1 on: since when it counts, who wrote it, its text."""

    version: int
    at_ns: int
    who: str
    document: str


class DocumentState(StateDatabase):
    """Documents and their earlier versions."""

    def document(self, name: DocumentName, version: int | None = None) -> KeptDocument | None:
        """A version of a document, the last one without a number; None where there is none."""
        kept = self.documents(name, 1, version)
        return kept[0] if kept else None

    def documents(self, name: DocumentName, most: int = 1000, version: int | None = None) -> list[KeptDocument]:
        """The versions of a document, newest first; of one number where it is named."""
        with self._transaction() as connection:
            rows = self._rows(
                connection,
                "SELECT version, at_ns, who, document FROM documents WHERE name = :name "
                "AND (:version = 0 OR version = :version) ORDER BY version DESC LIMIT :most",
                name=name, version=version or 0, most=most,
            )  # fmt: skip
            return [KeptDocument(row["version"], row["at_ns"], row["who"], row["document"]) for row in rows]

    def put_document(self, name: DocumentName, who: str, document: str) -> int:
        """Keep a new version; its number."""
        with self._transaction() as connection:
            # two who write at once get two numbers, or the second is refused by the key
            [row] = self._rows(
                connection,
                "SELECT COALESCE(MAX(version), 0) + 1 AS version FROM documents WHERE name = :name",
                name=name,
            )
            self._change(
                connection,
                "INSERT INTO documents (name, version, at_ns, who, document) "
                "VALUES (:name, :version, :now, :who, :document)",
                name=name, version=row["version"], now=self._now_ns(connection), who=who, document=document,
            )  # fmt: skip
            return int(row["version"])
