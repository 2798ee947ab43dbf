"""The statements that publish, one INSERT on the caller's connection, and the one that takes back what is not due yet.

Every parameter and every answer is text or null, with its type said in the statement, so that any driver can send
them. Only the columns that publishers may write are named, and everything is qualified, so that the caller's
search_path never matters. The server counts the bytes of the payload.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_PUBLISH = """\
INSERT INTO {schema}.outbox (event_id, topic, key, payload, headers, priority, size)
VALUES ($1::pg_catalog.text::pg_catalog.uuid, $2::pg_catalog.text, $3::pg_catalog.text, $4::pg_catalog.json,
        $5::pg_catalog.json, $6::pg_catalog.text::pg_catalog.int2,
        pg_catalog.octet_length($4::pg_catalog.json::pg_catalog.text))"""

# The payloads travel as one JSON array: its elements come out byte for byte, and no payload needs escaping.
_PUBLISH_MANY = """\
INSERT INTO {schema}.outbox (event_id, topic, key, payload, headers, priority, size)
SELECT e.event_id, e.topic, e.key, e.payload, e.headers, e.priority,
       pg_catalog.octet_length(e.payload::pg_catalog.text)
FROM ROWS FROM (
    pg_catalog.unnest($1::pg_catalog.text::pg_catalog.uuid[]),
    pg_catalog.unnest($2::pg_catalog.text::pg_catalog.text[]),
    pg_catalog.unnest($3::pg_catalog.text::pg_catalog.text[]),
    pg_catalog.json_array_elements($4::pg_catalog.json),
    pg_catalog.unnest($5::pg_catalog.text::pg_catalog.json[]),
    pg_catalog.unnest($6::pg_catalog.text::pg_catalog.int2[])
) WITH ORDINALITY AS e (event_id, topic, key, payload, headers, priority, place)
ORDER BY e.place"""

_SCHEDULE_MANY = """\
INSERT INTO {schema}.scheduled (due_at, event_id, topic, key, payload, headers, priority, size)
SELECT COALESCE(e.at, pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) e.delay),
       e.event_id, e.topic, e.key, e.payload, e.headers, e.priority,
       pg_catalog.octet_length(e.payload::pg_catalog.text)
FROM ROWS FROM (
    pg_catalog.unnest($1::pg_catalog.text::pg_catalog.uuid[]),
    pg_catalog.unnest($2::pg_catalog.text::pg_catalog.text[]),
    pg_catalog.unnest($3::pg_catalog.text::pg_catalog.text[]),
    pg_catalog.json_array_elements($4::pg_catalog.json),
    pg_catalog.unnest($5::pg_catalog.text::pg_catalog.json[]),
    pg_catalog.unnest($6::pg_catalog.text::pg_catalog.int2[]),
    pg_catalog.unnest($7::pg_catalog.text::pg_catalog.interval[]),
    pg_catalog.unnest($8::pg_catalog.text::pg_catalog.timestamptz[])
) WITH ORDINALITY AS e (event_id, topic, key, payload, headers, priority, delay, at, place)
ORDER BY e.place"""


_CANCEL = "SELECT CASE WHEN {schema}.cancel($1::pg_catalog.text::pg_catalog.uuid) THEN 'cancelled' END"


@dataclass(frozen=True, slots=True)
class PublishStatements:
    """The texts for one schema. Lists are array literals; payloads of many events are one JSON array."""

    schema: str
    publish: str = field(init=False)
    """event_id, topic, key, payload, headers, priority."""
    publish_many: str = field(init=False)
    """Lists of the same, in the order in which they get their ids."""
    schedule_many: str = field(init=False)
    """Lists of the same, then of delays and of moments; one of the two is null."""
    cancel: str = field(init=False)
    """event_id. Answers text if a delayed event was taken back, else null."""

    def __post_init__(self) -> None:
        quoted = '"' + self.schema.replace('"', '""') + '"'
        object.__setattr__(self, "publish", _PUBLISH.format(schema=quoted))
        object.__setattr__(self, "publish_many", _PUBLISH_MANY.format(schema=quoted))
        object.__setattr__(self, "schedule_many", _SCHEDULE_MANY.format(schema=quoted))
        object.__setattr__(self, "cancel", _CANCEL.format(schema=quoted))
