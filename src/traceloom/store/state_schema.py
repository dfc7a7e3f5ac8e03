"""The schema of the service's state.

The statements are of the SQL that SQLite and PostgreSQL share; the guard of the audit is written for each.
"""

from __future__ import annotations

from collections.abc import Mapping

VERSION = 3
"""Of the schema, which the database names; one of another version is refused."""

_TABLES = (
    (
        "CREATE TABLE captures (id TEXT PRIMARY KEY, day TEXT NOT NULL, job TEXT NOT NULL, uploader TEXT NOT NULL, "
        "received_ns BIGINT NOT NULL, complete BIGINT NOT NULL, bytes BIGINT NOT NULL, files TEXT NOT NULL)"
    ),
    "CREATE INDEX captures_received ON captures (received_ns)",
    (
        "CREATE TABLE tasks (id TEXT PRIMARY KEY, capture TEXT NOT NULL REFERENCES captures (id), "
        "version TEXT NOT NULL, state TEXT NOT NULL, attempts BIGINT NOT NULL, again BIGINT NOT NULL, "
        "holder TEXT NOT NULL, free_at_ns BIGINT NOT NULL, error TEXT NOT NULL, batch BIGINT, "
        "created_ns BIGINT NOT NULL)"
    ),
    "CREATE INDEX tasks_state ON tasks (state, free_at_ns)",
    "CREATE INDEX tasks_capture ON tasks (capture)",
    "CREATE TABLE batches (number BIGINT PRIMARY KEY, again BIGINT NOT NULL, done BIGINT NOT NULL)",
    "CREATE TABLE leases (name TEXT PRIMARY KEY, holder TEXT NOT NULL, until_ns BIGINT NOT NULL)",
    (
        "CREATE TABLE tokens (name TEXT PRIMARY KEY, role TEXT NOT NULL, sha256 TEXT NOT NULL UNIQUE, "
        "created_ns BIGINT NOT NULL, expires_ns BIGINT NOT NULL, revoked_ns BIGINT NOT NULL)"
    ),
    (
        "CREATE TABLE audit (id TEXT PRIMARY KEY, at_ns BIGINT NOT NULL, who TEXT NOT NULL, what TEXT NOT NULL, "
        "result TEXT NOT NULL, details TEXT NOT NULL)"
    ),
    "CREATE INDEX audit_time ON audit (at_ns)",
    (
        "CREATE TABLE hosts (host TEXT PRIMARY KEY, sha256 TEXT NOT NULL, enrolled_ns BIGINT NOT NULL, "
        "usage_through BIGINT NOT NULL)"
    ),
    "CREATE TABLE enrolments (sha256 TEXT PRIMARY KEY, host TEXT NOT NULL, expires_ns BIGINT NOT NULL)",
    (
        "CREATE TABLE requests (id TEXT PRIMARY KEY, asked_ns BIGINT NOT NULL, ended BIGINT NOT NULL, "
        "document TEXT NOT NULL)"
    ),
    "CREATE INDEX requests_asked ON requests (asked_ns)",
    (
        "CREATE TABLE usage_waiting (host TEXT NOT NULL, minute BIGINT NOT NULL, since BIGINT NOT NULL, batch BIGINT, "
        "document TEXT NOT NULL, PRIMARY KEY (host, minute))"
    ),
    "CREATE TABLE numbers (name TEXT PRIMARY KEY, value BIGINT NOT NULL)",
    (
        "CREATE TABLE documents (name TEXT NOT NULL, version BIGINT NOT NULL, at_ns BIGINT NOT NULL, "
        "who TEXT NOT NULL, document TEXT NOT NULL, PRIMARY KEY (name, version))"
    ),
    (
        "CREATE TABLE job_facts (job TEXT NOT NULL, since_ns BIGINT NOT NULL, batch BIGINT, document TEXT NOT NULL, "
        "PRIMARY KEY (job, since_ns))"
    ),
    (
        "CREATE TABLE webhooks (name TEXT PRIMARY KEY, url TEXT NOT NULL, secret TEXT NOT NULL, events TEXT NOT NULL, "
        "created_ns BIGINT NOT NULL, delivered BIGINT NOT NULL, failed BIGINT NOT NULL, dropped BIGINT NOT NULL, "
        "error TEXT NOT NULL)"
    ),
    (
        "CREATE TABLE deliveries (webhook TEXT NOT NULL, id TEXT NOT NULL, event TEXT NOT NULL, "
        "created_ns BIGINT NOT NULL, due_ns BIGINT NOT NULL, attempts BIGINT NOT NULL, document TEXT NOT NULL, "
        "PRIMARY KEY (webhook, id))"
    ),
    "CREATE INDEX deliveries_due ON deliveries (webhook, due_ns)",
    "CREATE TABLE settings (name TEXT PRIMARY KEY, document TEXT NOT NULL)",
    "CREATE TABLE trigger_counts (name TEXT PRIMARY KEY, document TEXT NOT NULL)",
    "CREATE TABLE trigger_charges (request TEXT PRIMARY KEY, document TEXT NOT NULL)",
    "CREATE TABLE regressions_seen (series TEXT PRIMARY KEY, since_ns BIGINT NOT NULL)",
    "CREATE TABLE sessions (sha256 TEXT PRIMARY KEY, token TEXT NOT NULL, expires_ns BIGINT NOT NULL)",
)

_GUARD: Mapping[str, tuple[str, ...]] = {
    "sqlite": tuple(
        f"CREATE TRIGGER audit_no_{verb} BEFORE {verb} ON audit "
        "BEGIN SELECT RAISE(ABORT, 'the audit is only appended to'); END"
        for verb in ("update", "delete")
    ),
    "postgresql": (
        (
            "CREATE FUNCTION audit_guard() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN RAISE EXCEPTION $$the audit is only appended to$$; END'"
        ),
        (
            "CREATE TRIGGER audit_guard BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
            "FOR EACH STATEMENT EXECUTE FUNCTION audit_guard()"
        ),
    ),
}

SCHEMA: Mapping[str, tuple[str, ...]] = {dialect: (*_TABLES, *guard) for dialect, guard in _GUARD.items()}
"""Dialect -> statements that make it."""
