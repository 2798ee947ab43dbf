"""publish(), for triggers and other languages: it refuses what the Python side refuses, and leaves nothing behind."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("an empty topic", {"topic": ""}, "invalid topic"),
    ("a pattern", {"topic": "orders.*"}, "invalid topic"),
    ("a long topic", {"topic": "a" * 256}, "invalid topic"),
    ("no payload", {"payload": None}, "the payload is NULL"),
    ("an empty key", {"key": ""}, "1 to 512 bytes"),
    ("a long key", {"key": "é" * 257}, "1 to 512 bytes"),
    ("headers that are a list", {"headers": "[]"}, "JSON object of strings"),
    ("a header that is a number", {"headers": '{"a": 1}'}, "header names"),
    ("a header in capitals", {"headers": '{"Trace_ID": "x"}'}, "header names"),
    ("a long header", {"headers": json.dumps({"a": "x" * 8193})}, "8 KiB"),
    ("many headers", {"headers": json.dumps({f"h{n}": "x" * 8000 for n in range(5)})}, "32 KiB"),
    ("a priority below the lowest", {"priority": -1}, "a priority is 0"),
    ("a priority above the highest", {"priority": 10}, "a priority is 0"),
    ("a delay into the past", {"delay": "-1 second"}, "not negative"),
    ("a delay of ages", {"delay": "9000 years"}, "at most 36500 days"),
]


@pytest.mark.parametrize(
    ("given", "message"), [(given, message) for _, given, message in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_sql_publish_refuses_what_no_consumer_could_use(
    conn: psycopg.Connection, given: dict[str, Any], message: str
) -> None:
    arguments = {"topic": "orders.created", "payload": "1", "key": None, "headers": None, "delay": None, "priority": 0}
    arguments |= given
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=message):
        conn.execute(
            "SELECT eventbus.publish(%(topic)s, %(payload)s::json, %(key)s, %(headers)s::json, %(delay)s::interval,"
            " priority => %(priority)s::integer)",
            arguments,
        )
    assert conn.execute("SELECT count(*) FROM eventbus.outbox").fetchone() == (0,)


def test_sql_publish_keeps_every_part_of_the_event(conn: psycopg.Connection) -> None:
    payload = '{"b":  1, "a": "\\u0000", "big": 1000000000000000000000000000001}'
    row = conn.execute(
        "SELECT eventbus.publish('orders.created', %s::json, 'k1', '{\"trace\": \"t\"}')", [payload]
    ).fetchone()
    assert row is not None
    stored = conn.execute(
        "SELECT event_id, topic, key, payload::text, headers->>'trace', size FROM eventbus.outbox"
    ).fetchone()
    assert stored == (row[0], "orders.created", "k1", payload, "t", len(payload.encode()))
    assert row[0].version == 7


def test_sql_publish_with_a_delay_waits_by_the_clock_of_the_database(conn: psycopg.Connection) -> None:
    conn.execute("SELECT eventbus.publish('orders.created', '1', delay => '1 hour')")
    row = conn.execute(
        "SELECT due_at BETWEEN clock_timestamp() + interval '59 minutes' AND clock_timestamp() + interval '61 minutes'"
        " FROM eventbus.scheduled"
    ).fetchone()
    assert row == (True,)
    assert conn.execute("SELECT count(*) FROM eventbus.outbox").fetchone() == (0,)


def test_a_trigger_can_take_back_what_it_has_scheduled(conn: psycopg.Connection) -> None:
    conn.execute(
        """
        CREATE TABLE carts (id int PRIMARY KEY, reminder uuid, bought boolean DEFAULT false);
        CREATE FUNCTION remind() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF TG_OP = 'INSERT' THEN
                NEW.reminder := eventbus.publish('carts.reminder', to_json(NEW.id), delay => '1 hour');
            ELSIF NEW.bought THEN
                IF NOT eventbus.cancel(NEW.reminder) THEN
                    NEW.reminder := NULL;
                END IF;
            END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER remind BEFORE INSERT OR UPDATE ON carts FOR EACH ROW EXECUTE FUNCTION remind();
        INSERT INTO carts VALUES (1), (2);
        """
    )
    conn.execute("SET search_path = ''")
    conn.execute("UPDATE public.carts SET bought = true WHERE id = 1")
    [(kept,)] = conn.execute("SELECT reminder FROM public.carts WHERE id = 2").fetchall()
    assert conn.execute("SELECT event_id FROM eventbus.scheduled").fetchall() == [(kept,)]
    conn.execute("DELETE FROM eventbus.scheduled")
    conn.execute("UPDATE public.carts SET bought = true WHERE id = 2")
    assert conn.execute("SELECT reminder FROM public.carts WHERE id = 2").fetchall() == [(None,)]
