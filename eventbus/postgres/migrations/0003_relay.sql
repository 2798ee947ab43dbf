-- The relay: from committed outbox rows to one numbered sequence of deliveries per queue.

-- Which database this is. A dump restored elsewhere, or a copy made with a template, shows another identity.
CREATE FUNCTION {schema}.identity(OUT system_identifier bigint, OUT database_oid oid)
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT c.system_identifier, d.oid
    FROM pg_catalog.pg_control_system() c, pg_catalog.pg_database d
    WHERE d.datname = pg_catalog.current_database();
END;

-- Position zero: nothing is relayed. Every row has an id above 0, so the snapshot does not matter.
INSERT INTO {schema}.ticks (id, snapshot, next_xid, ids_upto, system_identifier, database_oid)
SELECT 1, pg_catalog.pg_current_snapshot(), pg_catalog.pg_current_xact_id(), 0, i.system_identifier, i.database_oid
FROM {schema}.identity() i;

CREATE FUNCTION {schema}.require_read_committed() RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE invalid_transaction_state USING MESSAGE =
            'eventbus: the engine needs READ COMMITTED: it reads in new statements after it has locked';
    END IF;
END
$body$;

-- Which lane of its queue an event goes to, counted from the layout's first. Ordered: by the key; events without one
-- are spread. md5, because other hashes differ between versions of the server. Prioritized: the most urgent is 0.
CREATE FUNCTION {schema}.lane_of(p_kind text, p_lanes integer, p_key text, p_priority integer, p_outbox_id bigint)
RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE p_kind
    WHEN 'plain' THEN 0
    WHEN 'prioritized' THEN p_lanes - 1 - p_priority * p_lanes / 10
    ELSE CASE
        WHEN p_key IS NULL THEN (p_outbox_id % p_lanes)::integer
        ELSE (('x' || pg_catalog.left(pg_catalog.md5(p_key), 8))::bit(32)::bigint % p_lanes)::integer
    END
END;

-- Relays the next rows, at most p_limit deliveries (at least one event). The first thing its transaction writes.
--
-- The tables are read only through laterals that find single rows (OFFSET 0 keeps the planner from turning them into
-- joins that read whole tables), because this plan is often made while the tables are empty and kept while they grow.
--
-- state     'busy': another relay is at it. 'paused': see `eventbus resume`. 'foreign': restored elsewhere, attach
--           first. 'idle': nothing fresh. 'unknown': resolve() the topics first. 'ticked': wrote a tick.
-- more      fresh rows were left for the next tick
-- fed       queue numbers that got something
-- counts    how many deliveries each of them got
-- due_in    seconds until the next scheduled event (at or after p_due_from), null without one
--
-- Fresh, relative to the position S (snapshot, next_xid, ids_upto) and a new snapshot W:
--   a) id > ids_upto and visible in W: cannot be visible in S, whose rows all have lower ids;
--   b) id <= ids_upto, visible in W, not in S: its transaction was in progress at S, so its xid is one of S's
--      in-progress ones or lies between S's xmax and next_xid.
-- Both are merged by id before the limit, so that one last_id serves as position inside an open window.
-- A tick that found nothing moves the position only when it looked at more than p_limit ids in vain: those of a long
-- transaction, or of one that rolled back, are not to be looked at by every tick.
CREATE FUNCTION {schema}.tick(
    p_limit integer,
    p_due_from timestamptz DEFAULT '-infinity',
    OUT state text, OUT more boolean, OUT events integer, OUT deliveries integer,
    OUT fed integer[], OUT unknown text[], OUT due_in double precision, OUT counts integer[]
)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    t {schema}.ticks%ROWTYPE;
    v_here record;
    v_bus record;
    v_new boolean;
    v_window pg_snapshot;
    v_upto bigint;
    v_last bigint;
    v_next xid8;
    v_fresh integer;
    v_taken_upto bigint;
BEGIN
    more := false; events := 0; deliveries := 0; fed := '{}'; unknown := '{}'; counts := '{}';
    IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
        RAISE invalid_transaction_state USING MESSAGE = 'eventbus: a tick must be the first write of its transaction';
    END IF;
    PERFORM {schema}.require_read_committed();
    IF NOT pg_try_advisory_xact_lock({schema}.lock_key('tick')) THEN
        state := 'busy';
        RETURN;
    END IF;
    SELECT b.state, b.bindings_version INTO STRICT v_bus FROM {schema}.bus b;
    IF v_bus.state = 'paused' THEN
        state := 'paused';
        RETURN;
    END IF;
    SELECT * INTO STRICT t FROM {schema}.ticks ORDER BY id DESC LIMIT 1;
    SELECT * INTO STRICT v_here FROM {schema}.identity();
    v_new := t.window_snapshot IS NULL;
    v_window := pg_current_snapshot();
    IF (t.system_identifier, t.database_oid) <> (v_here.system_identifier, v_here.database_oid)
       OR pg_snapshot_xmax(coalesce(t.window_snapshot, t.snapshot)) > pg_snapshot_xmax(v_window) THEN
        state := 'foreign';
        RETURN;
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    IF v_new THEN
        SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END INTO v_upto FROM {schema}.outbox_id_seq s;
        v_last := 0;
    ELSE
        v_window := t.window_snapshot;
        v_upto := t.window_ids_upto;
        v_last := t.last_id;
    END IF;

    WITH RECURSIVE later (xid) AS (
        (SELECT o.xid FROM {schema}.outbox o
         WHERE v_last < t.ids_upto AND o.xid >= pg_snapshot_xmax(t.snapshot) AND o.xid <= t.next_xid
         ORDER BY o.xid LIMIT 1)
        UNION ALL
        SELECT (SELECT o.xid FROM {schema}.outbox o WHERE o.xid > l.xid AND o.xid <= t.next_xid
                ORDER BY o.xid LIMIT 1)
        FROM later l WHERE l.xid IS NOT NULL
    ), straggling AS (
        SELECT x.xid FROM (
            SELECT pg_snapshot_xip(t.snapshot) WHERE v_last < t.ids_upto
            UNION ALL SELECT l.xid FROM later l WHERE l.xid IS NOT NULL
        ) x (xid)
        WHERE pg_visible_in_snapshot(x.xid, v_window)
    ), fresh AS MATERIALIZED (
        SELECT u.id, u.topic, u.size, u.key, u.priority FROM (
            (SELECT o.id, o.topic, o.size, o.key, o.priority FROM {schema}.outbox o
             WHERE o.id > greatest(v_last, t.ids_upto) AND o.id <= v_upto
               AND pg_visible_in_snapshot(o.xid, v_window)
             ORDER BY o.id LIMIT p_limit)
            UNION ALL
            (SELECT o.id, o.topic, o.size, o.key, o.priority FROM straggling x CROSS JOIN LATERAL (
                SELECT o.id, o.topic, o.size, o.key, o.priority FROM {schema}.outbox o
                WHERE o.xid = x.xid AND o.id > v_last AND o.id <= t.ids_upto
                ORDER BY o.id LIMIT p_limit) o)
        ) u
        ORDER BY u.id LIMIT p_limit
    ), known AS MATERIALIZED (
        SELECT d.topic, p.id AS topic_id, p.fanout
        FROM (SELECT DISTINCT f.topic FROM fresh f) d
        LEFT JOIN LATERAL (
            SELECT p.id, p.fanout FROM {schema}.topics p
            WHERE p.topic = d.topic AND p.bindings_version = v_bus.bindings_version OFFSET 0) p ON true
    ), targets AS MATERIALIZED (
        SELECT p.topic_id, r.queue_id, l.lane_from, l.lanes, l.kind
        FROM known p
        CROSS JOIN LATERAL (SELECT r.queue_id FROM {schema}.routes r WHERE r.topic_id = p.topic_id OFFSET 0) r
        CROSS JOIN LATERAL (
            SELECT 1 FROM {schema}.queues q WHERE q.id = r.queue_id AND q.state = 'active' OFFSET 0) q
        CROSS JOIN LATERAL (
            SELECT l.lane_from, l.lanes, l.kind FROM {schema}.layouts l
            WHERE l.queue_id = r.queue_id ORDER BY l.lane_from DESC LIMIT 1) l
    ), resolved AS MATERIALIZED (
        SELECT f.id, f.topic, f.size, f.key, f.priority, p.topic_id, p.fanout,
               row_number() OVER upto AS n,
               sum(coalesce(p.fanout, 0)) OVER upto AS copies,
               bool_or(p.topic_id IS NULL) OVER upto AS blocked
        FROM fresh f JOIN known p ON p.topic = f.topic
        WINDOW upto AS (ORDER BY f.id ROWS UNBOUNDED PRECEDING)
    ), taken AS MATERIALIZED (
        SELECT r.id, r.size, r.key, r.priority, r.topic_id, r.fanout FROM resolved r
        WHERE NOT r.blocked AND (r.copies <= p_limit OR r.n = 1)
    ), copies AS MATERIALIZED (  -- place: queue and lane in one number, because that sorts faster
        SELECT c.place, c.id, c.size, row_number() OVER (PARTITION BY c.place ORDER BY c.id) AS n FROM (
            SELECT k.id, k.size, (r.queue_id::bigint << 32) + r.lane_from
                   + {schema}.lane_of(r.kind, r.lanes, k.key, k.priority, k.id) AS place
            FROM taken k JOIN targets r ON r.topic_id = k.topic_id
        ) c
    ), newest AS MATERIALIZED (
        SELECT q.place, q.queue_id, q.lane, coalesce((
            SELECT d.seq FROM {schema}.deliveries d WHERE d.queue_id = q.queue_id AND d.lane = q.lane
            ORDER BY d.seq DESC LIMIT 1), (
            SELECT c.hi FROM {schema}.claims c WHERE c.queue_id = q.queue_id AND c.lane = q.lane
            ORDER BY c.lo DESC LIMIT 1), 0) AS seq
        FROM (
            SELECT c.place, (c.place >> 32)::integer AS queue_id, (c.place & 4294967295)::integer AS lane
            FROM copies c WHERE c.n = 1
        ) q
    ), per_queue AS MATERIALIZED (
        SELECT (c.place >> 32)::integer AS queue_id, count(*)::integer AS n FROM copies c GROUP BY 1
    ), appended AS (
        INSERT INTO {schema}.deliveries (queue_id, lane, seq, outbox_id, size)
        SELECT w.queue_id, w.lane, w.seq + c.n, c.id, c.size
        FROM copies c JOIN newest w ON w.place = c.place
        ORDER BY c.place, c.n
        RETURNING 1
    ), counted AS (
        UPDATE {schema}.topics p SET unrouted = p.unrouted + k.n
        FROM (SELECT k.topic_id, count(*) AS n FROM taken k WHERE k.fanout = 0 GROUP BY k.topic_id) k
        WHERE p.id = k.topic_id AND p.id = ANY (ARRAY(SELECT k.topic_id FROM taken k WHERE k.fanout = 0))
    )
    SELECT (SELECT count(*) FROM fresh), (SELECT count(*) FROM taken), (SELECT max(k.id) FROM taken k),
           (SELECT count(*) FROM appended),
           ARRAY(SELECT p.queue_id FROM per_queue p ORDER BY p.queue_id),
           ARRAY(SELECT p.n FROM per_queue p ORDER BY p.queue_id),
           ARRAY(SELECT DISTINCT r.topic FROM resolved r WHERE r.topic_id IS NULL ORDER BY r.topic LIMIT 1000)
    INTO v_fresh, events, v_taken_upto, deliveries, fed, counts, unknown;

    IF events = 0 AND (v_fresh > 0 OR (v_new AND v_upto - t.ids_upto <= p_limit)) THEN
        state := CASE WHEN v_fresh > 0 THEN 'unknown' ELSE 'idle' END;
        due_in := {schema}.next_due(p_due_from);
        RETURN;
    END IF;
    IF (SELECT s.last_value FROM {schema}.relay_sleep s) > 0 THEN
        PERFORM setval('{schema}.relay_sleep'::regclass, 0);
    END IF;
    v_next := CASE WHEN v_new THEN pg_current_xact_id() ELSE t.window_next_xid END;
    IF events = v_fresh AND v_fresh < p_limit THEN
        INSERT INTO {schema}.ticks (id, snapshot, next_xid, ids_upto, system_identifier, database_oid,
                                    events, deliveries, fed)
        VALUES (t.id + 1, v_window, v_next, v_upto, t.system_identifier, t.database_oid, events, deliveries, fed);
    ELSE
        more := true;
        INSERT INTO {schema}.ticks (id, snapshot, next_xid, ids_upto, window_snapshot, window_next_xid,
                                    window_ids_upto, last_id, system_identifier, database_oid,
                                    events, deliveries, fed)
        VALUES (t.id + 1, t.snapshot, t.next_xid, t.ids_upto, v_window, v_next, v_upto, v_taken_upto,
                t.system_identifier, t.database_oid, events, deliveries, fed);
    END IF;
    IF events > 0 THEN  -- also when nobody was fed: the other relays need not look
        PERFORM pg_notify('{name}.work', CASE
            WHEN octet_length(array_to_string(fed, ',')) <= 1000 THEN array_to_string(fed, ',') ELSE '*' END)
        WHERE pg_notification_queue_usage() < 0.5;
    END IF;
    state := 'ticked';
    due_in := {schema}.next_due(p_due_from);
END
$body$;

-- Seconds until the first scheduled event at or after p_from is due; null without one.
CREATE FUNCTION {schema}.next_due(p_from timestamptz) RETURNS double precision
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT EXTRACT(EPOCH FROM s.due_at - pg_catalog.clock_timestamp())::double precision
    FROM {schema}.scheduled s WHERE s.due_at >= p_from
    ORDER BY s.due_at, s.id LIMIT 1;
END;

-- Says that a relay goes to sleep for p_seconds at most; it looks by itself within a second after that. Where several
-- sleep, the longest sleep counts. True when a publisher is in the middle of a transaction that may have seen the relay
-- awake: it holds a lock on the outbox, will not notify, and must be polled for.
CREATE FUNCTION {schema}.fall_asleep(p_seconds double precision) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM setval('{schema}.relay_sleep'::regclass,
                   greatest(s.last_value, ceil(date_part('epoch', clock_timestamp()) + p_seconds)::bigint + 1))
    FROM {schema}.relay_sleep s;
    RETURN EXISTS (
        SELECT 1 FROM pg_locks l
        WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock' AND l.pid IS DISTINCT FROM pg_backend_pid()
          AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
          AND l.relation IN ('{schema}.outbox'::regclass,
                             '{schema}.scheduled'::regclass));
END
$body$;

-- Moves due scheduled events to the outbox, at most p_limit, oldest first. Returns how many, and the due time of
-- the last one as a cursor: the low end of the table is where the dead rows are.
CREATE FUNCTION {schema}.fire_due(p_limit integer, p_from timestamptz,
                                  OUT fired integer, OUT upto timestamptz)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
    WITH due AS MATERIALIZED (
        SELECT s.id, s.due_at FROM {schema}.scheduled s
        WHERE s.due_at >= p_from AND s.due_at <= clock_timestamp()
        ORDER BY s.due_at, s.id LIMIT p_limit FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM {schema}.scheduled s WHERE s.id = ANY (ARRAY(SELECT d.id FROM due d)) RETURNING s.*
    ), published AS (
        INSERT INTO {schema}.outbox (event_id, topic, key, priority, payload, headers, size)
        SELECT g.event_id, g.topic, g.key, g.priority, g.payload, g.headers, g.size
        FROM gone g ORDER BY g.due_at, g.id
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM published), (SELECT max(d.due_at) FROM due d) INTO fired, upto;
END
$body$;

-- Creates or changes queues: [{"name", "patterns", "kind", "lanes", "tracking", "when_exhausted", "start"}]; the last
-- declaration of a name wins. What is left out stays as it is, and is plain, none, park and latest in a new queue. A
-- new queue gets what is relayed from now on; with start 'earliest' it is filled first. Returns each with its number.
CREATE FUNCTION {schema}.declare_queues(p_queues json) RETURNS TABLE (name text, id integer)
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_queue record;
    v_new boolean;
    v_number integer;
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM pg_advisory_xact_lock({schema}.lock_key('tick'));
    FOR v_queue IN
        SELECT r.* FROM json_to_recordset(p_queues) AS r (
            name text, kind text, lanes integer, tracking text, when_exhausted text, start text)
        ORDER BY r.name
    LOOP
        INSERT INTO {schema}.queues (name) VALUES (v_queue.name) ON CONFLICT DO NOTHING RETURNING queues.id
        INTO v_number;
        v_new := FOUND;
        IF v_new THEN
            INSERT INTO {schema}.layouts (queue_id, lane_from, lanes, kind)
            VALUES (v_number, 0, {schema}.lanes_wanted(coalesce(v_queue.kind, 'plain'), v_queue.lanes, NULL),
                    coalesce(v_queue.kind, 'plain'));
            IF v_queue.start = 'earliest' THEN
                PERFORM {schema}.begin_filling(v_number);
            END IF;
        ELSE
            SELECT q.id INTO STRICT v_number FROM {schema}.queues q WHERE q.name = v_queue.name;
            PERFORM {schema}.change_layout(v_number, v_queue.kind, v_queue.lanes);
        END IF;
        PERFORM {schema}.change_rules(v_number, v_queue.tracking, v_queue.when_exhausted);
    END LOOP;
    WITH wanted AS MATERIALIZED (
        SELECT q.id AS queue_id, p.pattern
        FROM json_to_recordset(p_queues) AS r (name text, patterns json)
        JOIN {schema}.queues q ON q.name = r.name,
             json_array_elements_text(r.patterns) AS p (pattern)
    ), removed AS (
        DELETE FROM {schema}.bindings b
        WHERE b.queue_id IN (SELECT w.queue_id FROM wanted w)
          AND NOT EXISTS (SELECT 1 FROM wanted w WHERE w.queue_id = b.queue_id AND w.pattern = b.pattern)
        RETURNING 1
    ), added AS (
        INSERT INTO {schema}.bindings (queue_id, pattern) SELECT DISTINCT w.queue_id, w.pattern FROM wanted w
        ON CONFLICT DO NOTHING
        RETURNING 1
    )
    UPDATE {schema}.bus SET bindings_version = bindings_version + 1
    WHERE (SELECT count(*) FROM removed) + (SELECT count(*) FROM added) > 0;
    RETURN QUERY SELECT q.name, q.id FROM {schema}.queues q
        WHERE q.name IN (SELECT r.name FROM json_to_recordset(p_queues) AS r (name text));
END
$body$;

-- Stores where topics go: {"topic": [queue numbers]}, computed from the bindings of p_version. False, and nothing
-- stored, when the bindings have changed since: compute again.
CREATE FUNCTION {schema}.resolve_topics(p_version bigint, p_routes json) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM pg_advisory_xact_lock({schema}.lock_key('tick'));
    PERFORM 1 FROM {schema}.bus b WHERE b.bindings_version = p_version;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO {schema}.topics (topic, bindings_version, fanout)
    SELECT r.key, p_version, json_array_length(r.value) FROM json_each(p_routes) r ORDER BY r.key
    ON CONFLICT (topic) DO UPDATE SET bindings_version = excluded.bindings_version, fanout = excluded.fanout;
    DELETE FROM {schema}.routes o USING {schema}.topics t, json_object_keys(p_routes) k (topic)
    WHERE o.topic_id = t.id AND t.topic = k.topic;
    INSERT INTO {schema}.routes (topic_id, queue_id)
    SELECT t.id, q.queue_id::integer
    FROM json_each(p_routes) r
    JOIN {schema}.topics t ON t.topic = r.key,
    json_array_elements_text(r.value) AS q (queue_id);
    RETURN true;
END
$body$;
