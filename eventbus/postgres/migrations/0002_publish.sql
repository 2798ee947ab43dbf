-- Publishing: the wake-up of a sleeping relay, and publish() and cancel() for triggers and other languages.

-- Advisory locks are one bigint hashed from the schema's oid, so that neither the application's own locks nor a
-- second bus in this database collide with ours.
CREATE FUNCTION {schema}.lock_key(kind text, queue_id integer DEFAULT 0, lane integer DEFAULT 0)
RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
RETURN pg_catalog.hashtextextended(
    pg_catalog.format('eventbus %s %s %s %s',
        pg_catalog.to_regnamespace('{schema}')::oid, kind, queue_id, lane), 0);

-- Until when a relay sleeps and asks to be notified, in whole seconds since 1970; 0: a relay is at work. A sequence,
-- because its value is not MVCC: a REPEATABLE READ publisher reads it fresh, and writing it leaves no dead rows. It ends
-- by itself, so that publishers do not notify for ever a relay that is gone.
CREATE SEQUENCE {schema}.relay_sleep MINVALUE 0 START 0 NO CYCLE;
GRANT SELECT ON SEQUENCE {schema}.relay_sleep TO PUBLIC;

-- When some session keeps the server's notification queue from draining, a notification could make the commit fail; so
-- none of ours is sent while the queue is half full, and the bus polls.
CREATE FUNCTION {schema}.wake_relay() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM pg_notify('{name}.relay', '') WHERE pg_notification_queue_usage() < 0.5;
    RETURN NULL;
END
$body$;

-- The condition is evaluated after the rows are inserted, and calls nothing of ours while the relay is awake.
CREATE TRIGGER wake_relay AFTER INSERT ON {schema}.outbox FOR EACH STATEMENT
    WHEN (pg_catalog.pg_sequence_last_value('{schema}.relay_sleep'::regclass)
          > pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()))
    EXECUTE FUNCTION {schema}.wake_relay();
CREATE TRIGGER wake_relay AFTER INSERT ON {schema}.scheduled FOR EACH STATEMENT
    WHEN (pg_catalog.pg_sequence_last_value('{schema}.relay_sleep'::regclass)
          > pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()))
    EXECUTE FUNCTION {schema}.wake_relay();

-- UUIDv7 (RFC 9562): 48 bits of milliseconds, version, 74 random bits.
CREATE FUNCTION {schema}.new_event_id() RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN pg_catalog.encode(
    pg_catalog.set_byte(
        pg_catalog.overlay(
            pg_catalog.uuid_send(pg_catalog.gen_random_uuid()),
            pg_catalog.substring(
                pg_catalog.int8send((EXTRACT(EPOCH FROM pg_catalog.clock_timestamp()) * 1000)::bigint), 3),
            1, 6),
        6,
        (pg_catalog.get_byte(pg_catalog.uuid_send(pg_catalog.gen_random_uuid()), 6) & 15) | 112),
    'hex')::uuid;

-- Publishes one event in the caller's transaction and returns its id. A delay makes it due that long after now,
-- by the database's clock. Refuses what the Python side refuses: bad topics, keys, headers and priorities.
CREATE FUNCTION {schema}.publish(
    topic text,
    payload json,
    key text DEFAULT NULL,
    headers json DEFAULT NULL,
    delay interval DEFAULT NULL,
    event_id uuid DEFAULT NULL,
    priority integer DEFAULT 0
) RETURNS uuid
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_id uuid := coalesce(publish.event_id, {schema}.new_event_id());
    v_size integer := octet_length(publish.payload::text);
    v_priority integer := coalesce(publish.priority, 0);
BEGIN
    IF publish.topic IS NULL OR publish.topic !~ '^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$'
       OR octet_length(publish.topic) > 255 THEN
        RAISE invalid_parameter_value USING MESSAGE = format(
            'eventbus: invalid topic %L: use 1 to 255 ASCII letters, digits, _ or -, in words joined by single dots',
            left(publish.topic, 300));
    END IF;
    IF publish.payload IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'eventbus: the payload is NULL: pass ''null''::json for no data';
    END IF;
    IF publish.key IS NOT NULL AND octet_length(publish.key) NOT BETWEEN 1 AND 512 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'eventbus: a key is 1 to 512 bytes of text';
    END IF;
    IF v_priority NOT BETWEEN 0 AND 9 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'eventbus: a priority is 0 (the default) to 9 (first)';
    END IF;
    IF publish.delay < interval '0' OR publish.delay > interval '36500 days' THEN
        RAISE invalid_parameter_value USING MESSAGE = 'eventbus: a delay is not negative and at most 36500 days';
    END IF;
    IF publish.headers IS NOT NULL THEN
        IF json_typeof(publish.headers) <> 'object' THEN
            RAISE invalid_parameter_value USING MESSAGE = 'eventbus: headers are a JSON object of strings';
        END IF;
        PERFORM 1 FROM json_each(publish.headers) h
            WHERE json_typeof(h.value) <> 'string' OR h.key !~ '^[a-z0-9][a-z0-9._-]{0,127}$'
               OR octet_length(h.value::text) > 8194;
        IF FOUND OR octet_length(publish.headers::text) > 32768 THEN
            RAISE invalid_parameter_value USING MESSAGE = 'eventbus: header names are at most 128 lower-case letters,'
                ' digits, . _ or -, their values are strings of at most 8 KiB, all together at most 32 KiB';
        END IF;
    END IF;
    IF publish.delay IS NULL THEN
        INSERT INTO {schema}.outbox (event_id, topic, key, payload, headers, priority, size)
        VALUES (v_id, publish.topic, publish.key, publish.payload, publish.headers, v_priority, v_size);
    ELSE
        INSERT INTO {schema}.scheduled (due_at, event_id, topic, key, payload, headers, priority, size)
        VALUES (clock_timestamp() + publish.delay, v_id, publish.topic, publish.key, publish.payload,
                publish.headers, v_priority, v_size);
    END IF;
    RETURN v_id;
END
$body$;

-- Takes back a delayed event that has not fired, in the caller's transaction; false if there is none. Whoever comes
-- second, the relay that fires it or the cancel, waits for the first or leaves the row alone: it is one of the two. A
-- REPEATABLE READ caller whose snapshot is older than the firing gets a serialization failure.
CREATE FUNCTION {schema}.cancel(event_id uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    DELETE FROM {schema}.scheduled s WHERE s.event_id = cancel.event_id;
    RETURN FOUND;
END
$body$;
