-- Circuit breakers: how often each queue was opened, why, and when it closed; whether it is open now is in pauses.

-- A row for each queue that was ever opened. trips: how often in a row since it was last closed. error: type and message
-- of the failure that opened it. A row without a pause of the source circuit_breaker is closed, whoever removed that.
CREATE TABLE {schema}.circuit_breakers (
    queue     text PRIMARY KEY,
    trips     integer NOT NULL DEFAULT 0,
    opened_at timestamptz,
    began_at  timestamptz,
    reason    text,
    error     text,
    closed_at timestamptz
);
COMMENT ON COLUMN {schema}.circuit_breakers.opened_at IS 'the newest opening or failed probe';
COMMENT ON COLUMN {schema}.circuit_breakers.began_at IS 'the first opening since it was last closed';

-- Opens the breaker of a queue: the first pause takes p_first seconds, each one after a failed probe p_factor times as
-- long, but p_longest at most. p_probe_age: for how many seconds the failed probe ran; null if there was none.
--
-- opened    by this call: the pause takes so many seconds.
-- open      before, by whomever: for so many seconds more, 0 while it is tried. Nothing was counted.
-- closed    by somebody, before the probe failed. Nothing was counted.
-- unknown   there is no such queue.
--
-- Of several processes that find the same out at once, the row lets one open it. A probe that began before the newest
-- opening tells nothing new. Nobody who holds locks of the engine waits for this row.
CREATE FUNCTION {schema}.circuit_breaker_open(
    p_queue text, p_probe_age double precision, p_reason text, p_error text, p_first double precision,
    p_factor double precision, p_longest double precision, p_probe_seconds double precision,
    OUT state text, OUT seconds double precision, OUT trips integer)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_row {schema}.circuit_breakers;
    v_id integer := (SELECT q.id FROM {schema}.queues q WHERE q.name = p_queue);
    v_until timestamptz;
    v_paused boolean;
BEGIN
    state := 'unknown';
    seconds := 0;
    trips := 0;
    IF v_id IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO {schema}.circuit_breakers (queue) VALUES (p_queue) ON CONFLICT (queue) DO NOTHING;
    SELECT * INTO v_row FROM {schema}.circuit_breakers b WHERE b.queue = p_queue FOR UPDATE;
    SELECT p.until INTO v_until FROM {schema}.pauses p WHERE p.queue_id = v_id AND p.source = 'circuit_breaker';
    v_paused := FOUND;
    IF NOT v_paused AND p_probe_age IS NOT NULL THEN
        state := 'closed';
        RETURN;
    ELSIF v_paused AND (p_probe_age IS NULL
                        OR clock_timestamp() - make_interval(secs => p_probe_age) <= v_row.opened_at) THEN
        state := 'open';
        seconds := greatest(0, EXTRACT(EPOCH FROM v_until - clock_timestamp()));
        trips := v_row.trips;
        RETURN;
    END IF;
    trips := CASE WHEN v_paused THEN v_row.trips ELSE 0 END + 1;
    seconds := least(p_longest, p_first * power(p_factor, least(trips - 1, 100)));
    IF NOT {schema}.pause_queue(v_id, 'circuit_breaker', p_reason || COALESCE('; ' || p_error, ''), seconds,
                                p_probe_seconds) THEN
        RETURN;
    END IF;
    UPDATE {schema}.circuit_breakers b
    SET trips = circuit_breaker_open.trips, reason = p_reason, error = p_error, opened_at = clock_timestamp(),
        began_at = CASE WHEN v_paused THEN b.began_at ELSE clock_timestamp() END, closed_at = NULL
    WHERE b.queue = p_queue;
    state := 'opened';
END
$body$;

-- Closes the breaker of a queue. p_probe_age: for how many seconds the successful probe ran; null if a person closes it.
-- Null: it is not open, or it was opened after that probe had begun. Otherwise for how many seconds it was open, and how
-- often in a row it had opened.
CREATE FUNCTION {schema}.circuit_breaker_close(p_queue text, p_probe_age double precision,
                                               OUT seconds double precision, OUT trips integer)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_row {schema}.circuit_breakers;
BEGIN
    SELECT * INTO v_row FROM {schema}.circuit_breakers b WHERE b.queue = p_queue FOR UPDATE;
    IF clock_timestamp() - make_interval(secs => p_probe_age) <= v_row.opened_at THEN
        RETURN;
    END IF;
    IF NOT COALESCE({schema}.resume_queue((SELECT q.id FROM {schema}.queues q WHERE q.name = p_queue),
                                          'circuit_breaker'), false) THEN
        RETURN;
    END IF;
    seconds := EXTRACT(EPOCH FROM clock_timestamp() - v_row.began_at);
    trips := v_row.trips;
    UPDATE {schema}.circuit_breakers b SET closed_at = clock_timestamp() WHERE b.queue = p_queue;
END
$body$;

-- Every queue that was ever opened. state: closed, open, probing (an event is being tried) or ready (the next one will
-- be); seconds: how long that lasts, at most. What is gone from the queues is not listed.
CREATE VIEW {schema}.circuit_breaker_states AS
SELECT b.queue,
       CASE WHEN p.queue_id IS NULL THEN 'closed'
            WHEN p.probe_until > now.at THEN 'probing'
            WHEN p.until > now.at THEN 'open'
            ELSE 'ready' END AS state,
       greatest(0, EXTRACT(EPOCH FROM CASE WHEN p.probe_until > now.at THEN p.probe_until ELSE p.until END - now.at)
               )::double precision AS seconds,
       CASE WHEN p.queue_id IS NULL THEN 0 ELSE b.trips END AS trips,
       b.began_at, b.opened_at, b.closed_at, b.reason, b.error
FROM {schema}.circuit_breakers b
JOIN {schema}.queues q ON q.name = b.queue
LEFT JOIN {schema}.pauses p ON p.queue_id = q.id AND p.source = 'circuit_breaker'
CROSS JOIN LATERAL (SELECT pg_catalog.clock_timestamp() AS at) now;
