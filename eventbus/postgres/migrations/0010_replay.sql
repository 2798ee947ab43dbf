-- Once more: dead letters go back to their queues, and retained events are played into a queue.

CREATE INDEX dead_letters_key ON {schema}.dead_letters (queue_id, key, seq) WHERE key IS NOT NULL;

-- A moment as programs can hold it: within the years 1 to 9999 in every time zone.
CREATE FUNCTION {schema}.shown(p_moment timestamptz) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_moment < '0001-01-03 00:00:00+00'::timestamptz THEN '0001-01-03 00:00:00+00'::timestamptz
            WHEN p_moment > '9999-12-29 00:00:00+00'::timestamptz THEN '9999-12-29 00:00:00+00'::timestamptz
            ELSE p_moment END;

-- The dead letters that fit everything that is given. p_error: a part of the reason, of the last error's type or of its
-- message, in capitals or not. The planner makes it a part of the statement that asks.
CREATE FUNCTION {schema}.chosen_letters(p_ids bigint[], p_queue integer, p_topics text[], p_error text,
                                        p_since timestamptz, p_until timestamptz)
RETURNS SETOF {schema}.dead_letters
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT l.* FROM {schema}.dead_letters l
    WHERE (p_ids IS NULL OR l.id = ANY (p_ids))
      AND (p_queue IS NULL OR l.queue_id = p_queue)
      AND (p_topics IS NULL OR l.topic = ANY (p_topics))
      AND (p_since IS NULL OR l.died_at >= p_since)
      AND (p_until IS NULL OR l.died_at < p_until)
      AND (p_error IS NULL OR pg_catalog.strpos(
          pg_catalog.lower(pg_catalog.concat_ws(
              E'\n', l.reason, l.last_error ->> 'type', l.last_error ->> 'message')),
          pg_catalog.lower(p_error)) > 0);
END;

-- Locks the lanes of dead letters. Raises serialization_failure if one of them has changed its lane meanwhile: again.
CREATE FUNCTION {schema}.lock_letters(p_letters bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $body$
DECLARE
    v_queues integer[];
    v_lanes integer[];
BEGIN
    PERFORM {schema}.require_read_committed();
    SELECT array_agg(l.queue_id), array_agg(l.lane) INTO v_queues, v_lanes
    FROM (SELECT DISTINCT l.queue_id, l.lane FROM {schema}.dead_letters l WHERE l.id = ANY (p_letters)) l;
    PERFORM {schema}.lock_lanes(v_queues, v_lanes);
    PERFORM 1 FROM {schema}.dead_letters l WHERE l.id = ANY (p_letters)
        AND (l.queue_id, l.lane) NOT IN (SELECT u.queue_id, u.lane FROM unnest(v_queues, v_lanes) AS u (queue_id, lane));
    IF FOUND THEN
        RAISE serialization_failure USING MESSAGE = 'eventbus: the lanes of a queue have changed meanwhile; try again';
    END IF;
END
$body$;

-- Moves dead letters back to their queues, each in one piece: due now, attempts from the start. Returns those that it
-- moved; a letter that has lost its event stays. An event that retention has removed returns under its old id, with an
-- xid that every snapshot sees, so that it is not relayed again. In an ordered queue a letter runs when nothing of its
-- key is under way and nothing earlier of it waits or is dead; else it is parked until then. Under the tick lock, so
-- that neither retention nor the drop of a queue overlooks what returns.
CREATE FUNCTION {schema}.redrive(p_letters bigint[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $body$
DECLARE
    v_moved bigint[];
    v_rows bigint[];
    v_lane record;
BEGIN
    PERFORM pg_advisory_xact_lock({schema}.lock_key('tick'));
    PERFORM {schema}.lock_letters(p_letters);
    WITH picked AS MATERIALIZED (
        SELECT l.*, CASE WHEN {schema}.is_ordered(l.queue_id, l.lane) THEN l.key END AS ordered_by
        FROM {schema}.dead_letters l WHERE l.id = ANY (p_letters) AND l.event_id IS NOT NULL ORDER BY l.id FOR UPDATE
    ), restored AS (
        INSERT INTO {schema}.outbox (id, xid, published_at, event_id, size, topic, key, payload, headers)
        OVERRIDING SYSTEM VALUE
        SELECT p.outbox_id, '2'::xid8, coalesce(p.published_at, p.died_at), p.event_id, octet_length(p.payload::text),
               p.topic, p.key, p.payload, p.headers
        FROM picked p ORDER BY p.outbox_id
        ON CONFLICT (id) DO NOTHING
    ), gone AS (
        DELETE FROM {schema}.dead_letters l WHERE l.id = ANY (ARRAY(SELECT p.id FROM picked p))
    ), queued AS (
        INSERT INTO {schema}.exceptions (due_at, seq, outbox_id, queue_id, lane, replay_id, key, redriven_from, state)
        SELECT clock_timestamp(), p.seq, p.outbox_id, p.queue_id, p.lane, p.replay_id, p.ordered_by, p.id,
               CASE WHEN p.ordered_by IS NULL THEN 'waiting' ELSE 'parked' END
        FROM picked p ORDER BY p.queue_id, p.lane, p.seq
        RETURNING id, redriven_from
    )
    SELECT coalesce(array_agg(q.redriven_from ORDER BY q.redriven_from), '{}'), array_agg(q.id)
    INTO v_moved, v_rows FROM queued q;
    FOR v_lane IN
        SELECT e.queue_id, e.lane, array_agg(DISTINCT e.key) AS keys FROM {schema}.exceptions e
        WHERE e.id = ANY (v_rows) AND e.state = 'parked' GROUP BY e.queue_id, e.lane
    LOOP
        UPDATE {schema}.exceptions e SET state = 'waiting'
        WHERE e.id = ANY (ARRAY(
            SELECT f.id FROM unnest(v_lane.keys) AS k (key)
            CROSS JOIN LATERAL (
                SELECT x.id, x.seq FROM {schema}.exceptions x
                WHERE x.queue_id = v_lane.queue_id AND x.lane = v_lane.lane AND x.key = k.key
                ORDER BY x.seq LIMIT 1) f
            WHERE f.id = ANY (v_rows)
              AND NOT EXISTS (
                SELECT 1 FROM {schema}.exceptions x
                WHERE x.queue_id = v_lane.queue_id AND x.lane = v_lane.lane AND x.key = k.key
                  AND x.state <> 'parked')
              AND NOT EXISTS (
                SELECT 1 FROM {schema}.dead_letters l
                WHERE l.queue_id = v_lane.queue_id AND l.lane = v_lane.lane AND l.key = k.key AND l.blocks
                  AND l.seq < f.seq)));
        PERFORM {schema}.advance_keys(v_lane.queue_id, v_lane.lane, v_lane.keys);
    END LOOP;
    PERFORM pg_notify('{name}.work', '*') WHERE v_moved <> '{}' AND pg_notification_queue_usage() < 0.5;
    RETURN v_moved;
END
$body$;

-- Removes dead letters for good, and lets the next event run of each key that they blocked. Returns those it removed.
CREATE FUNCTION {schema}.discard(p_letters bigint[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $body$
DECLARE
    v_gone bigint[];
    v_queues integer[];
    v_lanes integer[];
    v_keys text[];
    v_lane record;
    v_released integer := 0;
BEGIN
    PERFORM {schema}.lock_letters(p_letters);
    WITH picked AS MATERIALIZED (
        SELECT l.id FROM {schema}.dead_letters l WHERE l.id = ANY (p_letters) ORDER BY l.id FOR UPDATE
    ), gone AS (
        DELETE FROM {schema}.dead_letters l WHERE l.id = ANY (ARRAY(SELECT p.id FROM picked p))
        RETURNING l.id, l.queue_id, l.lane, l.key, l.blocks
    )
    SELECT coalesce(array_agg(g.id ORDER BY g.id), '{}'), array_agg(g.queue_id) FILTER (WHERE g.blocks),
           array_agg(g.lane) FILTER (WHERE g.blocks), array_agg(g.key) FILTER (WHERE g.blocks)
    INTO v_gone, v_queues, v_lanes, v_keys FROM gone g;
    FOR v_lane IN
        SELECT u.queue_id, u.lane, array_agg(u.key) AS keys
        FROM unnest(v_queues, v_lanes, v_keys) AS u (queue_id, lane, key) GROUP BY u.queue_id, u.lane
    LOOP
        v_released := v_released + {schema}.advance_keys(v_lane.queue_id, v_lane.lane, v_lane.keys);
    END LOOP;
    PERFORM pg_notify('{name}.work', '*') WHERE v_released > 0 AND pg_notification_queue_usage() < 0.5;
    RETURN v_gone;
END
$body$;

-- As far as the relay has come: rows above it are not relayed, of those below some may not be.
CREATE FUNCTION {schema}.relayed_upto() RETURNS bigint
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT greatest(t.ids_upto, t.last_id) FROM {schema}.ticks t ORDER BY t.id DESC LIMIT 1;
END;

-- Everything from p_moment on, of the rows up to p_upto, has this id or a higher one. Found by bisection: ids
-- and moments ascend together as long as the server's clock is not set back by more than a day.
CREATE FUNCTION {schema}.first_id_since(p_moment timestamptz, p_upto bigint) RETURNS bigint
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
DECLARE
    v_lo bigint := 0;       -- the wanted id is above
    v_hi bigint := p_upto;  -- or at most this plus 1
    v_middle bigint;
    v_row record;
BEGIN
    WHILE v_lo < v_hi LOOP
        v_middle := v_lo + (v_hi - v_lo) / 2;
        SELECT o.id, o.published_at INTO v_row FROM {schema}.outbox o
        WHERE o.id > v_middle AND o.id <= v_hi ORDER BY o.id LIMIT 1;
        IF v_row.id IS NULL OR v_row.published_at >= p_moment - interval '1 day' THEN
            v_hi := v_middle;
        ELSE
            v_lo := v_row.id;
        END IF;
    END LOOP;
    RETURN v_lo + 1;
END
$body$;

-- The rows of the outbox that a replay of a period looks at: those above after_id and up to upto_id.
CREATE FUNCTION {schema}.replay_range(p_since timestamptz, p_until timestamptz, OUT after_id bigint, OUT upto_id bigint)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    after_id := 0;
    upto_id := {schema}.relayed_upto();
    IF p_until IS NOT NULL THEN
        upto_id := {schema}.first_id_since(p_until + interval '2 days', upto_id) - 1;
    END IF;
    IF p_since IS NOT NULL THEN
        after_id := {schema}.first_id_since(p_since, upto_id) - 1;
    END IF;
END
$body$;

-- Begins a replay: nothing is played yet. Its end is where the relay is now.
CREATE FUNCTION {schema}.begin_replay(p_queue integer, p_since timestamptz, p_until timestamptz, p_topics text[])
RETURNS integer
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_id integer;
BEGIN
    INSERT INTO {schema}.replays (queue_id, since, until, topics, last_id, upto_id)
    SELECT p_queue, p_since, p_until, p_topics, r.after_id, r.upto_id FROM {schema}.replay_range(p_since, p_until) r
    RETURNING id INTO v_id;
    RETURN v_id;
END
$body$;

-- Plays the next events of a replay into its queue: at most p_limit, of at most p_look rows of the outbox. Everything
-- that the relay has relayed, in the order of ids, numbered as the relay numbers; with it, in one transaction, how far
-- the replay has come. Under the tick lock, as everybody who appends deliveries.
--
-- state   'gone': there is no such replay, because its queue was dropped. 'paused', 'foreign': see `eventbus resume`.
--         'running' | 'finished': as it is now.
CREATE FUNCTION {schema}.replay_step(p_replay integer, p_limit integer, p_look integer,
                                     OUT state text, OUT deliveries integer, OUT at_id bigint)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $body$
DECLARE
    r {schema}.replays%ROWTYPE;
    t {schema}.ticks%ROWTYPE;
    l {schema}.layouts%ROWTYPE;
    v_looked integer;
BEGIN
    deliveries := 0;
    PERFORM {schema}.require_read_committed();
    PERFORM pg_advisory_xact_lock({schema}.lock_key('tick'));
    SELECT * INTO r FROM {schema}.replays x WHERE x.id = p_replay
        AND EXISTS (SELECT 1 FROM {schema}.bindings b WHERE b.queue_id = x.queue_id);
    IF r.id IS NULL THEN
        state := 'gone';
        RETURN;
    END IF;
    state := r.state;
    at_id := r.last_id;
    IF {schema}.is_foreign() THEN
        state := 'foreign';
    ELSIF (SELECT b.state FROM {schema}.bus b) = 'paused' THEN
        state := 'paused';
    END IF;
    IF state <> 'running' THEN
        RETURN;
    END IF;
    SELECT * INTO STRICT t FROM {schema}.ticks x ORDER BY x.id DESC LIMIT 1;
    SELECT * INTO STRICT l FROM {schema}.layouts x WHERE x.queue_id = r.queue_id ORDER BY x.lane_from DESC LIMIT 1;
    WITH looked AS MATERIALIZED (
        SELECT o.id, o.xid, o.published_at, o.topic, o.key, o.priority, o.size FROM {schema}.outbox o
        WHERE o.id > r.last_id AND o.id <= r.upto_id ORDER BY o.id LIMIT p_look
    ), chosen AS MATERIALIZED (
        SELECT o.id, o.size, l.lane_from + {schema}.lane_of(l.kind, l.lanes, o.key, o.priority, o.id) AS lane
        FROM looked o
        WHERE o.topic IN (SELECT u.topic FROM unnest(r.topics) AS u (topic))
          AND (r.since IS NULL OR o.published_at >= r.since) AND (r.until IS NULL OR o.published_at < r.until)
          AND ((o.id <= t.ids_upto AND pg_visible_in_snapshot(o.xid, t.snapshot))
               OR coalesce(o.id <= t.last_id AND pg_visible_in_snapshot(o.xid, t.window_snapshot), false))
        ORDER BY o.id LIMIT p_limit
    ), numbered AS MATERIALIZED (
        SELECT c.id, c.size, c.lane, row_number() OVER (PARTITION BY c.lane ORDER BY c.id) AS n FROM chosen c
    ), newest AS MATERIALIZED (
        SELECT f.lane, coalesce((
            SELECT d.seq FROM {schema}.deliveries d WHERE d.queue_id = r.queue_id AND d.lane = f.lane
            ORDER BY d.seq DESC LIMIT 1), (
            SELECT c.hi FROM {schema}.claims c WHERE c.queue_id = r.queue_id AND c.lane = f.lane
            ORDER BY c.lo DESC LIMIT 1), 0) AS seq
        FROM (SELECT DISTINCT n.lane FROM numbered n) f
    ), appended AS (
        INSERT INTO {schema}.deliveries (queue_id, lane, seq, outbox_id, replay_id, size)
        SELECT r.queue_id, n.lane, w.seq + n.n, n.id, r.id, n.size
        FROM numbered n JOIN newest w ON w.lane = n.lane ORDER BY n.lane, n.n
    )
    SELECT (SELECT count(*) FROM chosen), (SELECT count(*) FROM looked),
           CASE WHEN (SELECT count(*) FROM chosen) = p_limit THEN (SELECT max(c.id) FROM chosen c)
                ELSE coalesce((SELECT max(k.id) FROM looked k), r.upto_id) END
    INTO deliveries, v_looked, at_id;
    IF at_id >= r.upto_id OR (v_looked < p_look AND deliveries < p_limit) THEN
        state := 'finished';
        at_id := r.upto_id;
    END IF;
    UPDATE {schema}.replays x SET last_id = at_id, deliveries = x.deliveries + replay_step.deliveries,
        state = replay_step.state
    WHERE x.id = r.id;
    PERFORM pg_notify('{name}.work', r.queue_id::text)
    WHERE deliveries > 0 AND pg_notification_queue_usage() < 0.5;
END
$body$;
