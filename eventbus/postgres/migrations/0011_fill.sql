-- Filling: a new queue that starts with the earliest event that the outbox keeps.
--
-- Until it has come as far as the relay, the relay leaves it out. It has a position of its own, of the same kind as that
-- of a tick (0003_relay.sql), which begins at zero and follows the relay's: first to the snapshot of the newest tick;
-- then, if that tick has an open window, through the part of the window that is relayed. Every step holds the tick lock,
-- so that the relay's position stands still meanwhile; in the step in which both are the same, the queue becomes active.

-- Begins at position zero. The queue gets nothing from the relay until it has come as far as the relay.
CREATE FUNCTION {schema}.begin_filling(p_queue integer) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    UPDATE {schema}.queues q SET state = 'filling' WHERE q.id = p_queue;
    INSERT INTO {schema}.fillings (queue_id, snapshot, next_xid, ids_upto)
    SELECT p_queue, t.snapshot, t.next_xid, 0 FROM {schema}.ticks t ORDER BY t.id LIMIT 1;
END
$body$;

-- Whether two positions are the same one.
CREATE FUNCTION {schema}.is_same_position(p_snapshot pg_snapshot, p_next xid8, p_upto bigint,
                                          q_snapshot pg_snapshot, q_next xid8, q_upto bigint) RETURNS boolean
LANGUAGE sql IMMUTABLE
RETURN COALESCE(p_upto = q_upto AND p_next = q_next AND p_snapshot::text = q_snapshot::text, false);

-- Whether a queue has a delivery of this outbox row, apart from replays. By ranges of blocks: not for many rows.
CREATE FUNCTION {schema}.has_delivery(p_queue integer, p_outbox_id bigint) RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
    RETURN EXISTS (
        SELECT 1 FROM (SELECT d.* FROM {schema}.deliveries d WHERE d.outbox_id = p_outbox_id OFFSET 0) d
        WHERE d.queue_id = p_queue AND d.replay_id = 0);
END
$body$;

-- The next step of a filling queue: looks at p_limit events at most.
--
-- state     'busy': somebody else holds the tick lock, or the relay must attach first. 'paused': see `eventbus resume`.
--           'unknown': resolve() the topics first. 'more': not there yet. 'filled': this step made it active.
--           'active': it was active before, or is gone.
CREATE FUNCTION {schema}.fill(p_queue integer, p_limit integer,
                              OUT state text, OUT events integer, OUT deliveries integer, OUT unknown text[])
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_at {schema}.fillings%ROWTYPE;
    t {schema}.ticks%ROWTYPE;
    v_bus record;
    v_here record;
    v_open boolean;
    v_to bigint;
    v_fresh integer;
    v_taken_upto bigint;
BEGIN
    events := 0; deliveries := 0; unknown := '{}';
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
    SELECT * INTO v_at FROM {schema}.fillings x WHERE x.queue_id = p_queue;
    IF v_at.queue_id IS NULL THEN
        state := 'active';
        RETURN;
    END IF;
    SELECT * INTO STRICT t FROM {schema}.ticks ORDER BY id DESC LIMIT 1;
    SELECT * INTO STRICT v_here FROM {schema}.identity();
    IF (t.system_identifier, t.database_oid) <> (v_here.system_identifier, v_here.database_oid) THEN
        state := 'busy';
        RETURN;
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    IF v_at.window_snapshot IS NULL THEN
        v_at.last_id := 0;
        IF NOT {schema}.is_same_position(v_at.snapshot, v_at.next_xid, v_at.ids_upto, t.snapshot, t.next_xid, t.ids_upto) THEN
            v_at.window_snapshot := t.snapshot;
            v_at.window_next_xid := t.next_xid;
            v_at.window_ids_upto := t.ids_upto;
        ELSIF t.window_snapshot IS NOT NULL THEN
            v_at.window_snapshot := t.window_snapshot;
            v_at.window_next_xid := t.window_next_xid;
            v_at.window_ids_upto := t.window_ids_upto;
        ELSE
            state := {schema}.end_filling(p_queue);
            RETURN;
        END IF;
    END IF;
    -- The window is one that the relay has passed, or the one in which it is; of that, only what is relayed.
    v_open := {schema}.is_same_position(v_at.window_snapshot, v_at.window_next_xid, v_at.window_ids_upto,
                                        t.window_snapshot, t.window_next_xid, t.window_ids_upto);
    v_to := CASE WHEN v_open THEN least(t.last_id, v_at.window_ids_upto) ELSE v_at.window_ids_upto END;

    WITH RECURSIVE later (xid) AS (
        (SELECT o.xid FROM {schema}.outbox o
         WHERE v_at.last_id < v_at.ids_upto AND o.xid >= pg_snapshot_xmax(v_at.snapshot) AND o.xid <= v_at.next_xid
         ORDER BY o.xid LIMIT 1)
        UNION ALL
        SELECT (SELECT o.xid FROM {schema}.outbox o WHERE o.xid > l.xid AND o.xid <= v_at.next_xid
                ORDER BY o.xid LIMIT 1)
        FROM later l WHERE l.xid IS NOT NULL
    ), straggling AS (
        SELECT x.xid FROM (
            SELECT pg_snapshot_xip(v_at.snapshot) WHERE v_at.last_id < v_at.ids_upto
            UNION ALL SELECT l.xid FROM later l WHERE l.xid IS NOT NULL
        ) x (xid)
        WHERE pg_visible_in_snapshot(x.xid, v_at.window_snapshot)
    ), fresh AS MATERIALIZED (
        SELECT u.id, u.topic, u.size, u.key, u.priority FROM (
            (SELECT o.id, o.topic, o.size, o.key, o.priority FROM {schema}.outbox o
             WHERE o.id > greatest(v_at.last_id, v_at.ids_upto) AND o.id <= v_to
               AND pg_visible_in_snapshot(o.xid, v_at.window_snapshot)
             ORDER BY o.id LIMIT p_limit)
            UNION ALL
            (SELECT o.id, o.topic, o.size, o.key, o.priority FROM straggling x CROSS JOIN LATERAL (
                SELECT o.id, o.topic, o.size, o.key, o.priority FROM {schema}.outbox o
                WHERE o.xid = x.xid AND o.id > v_at.last_id AND o.id <= least(v_at.ids_upto, v_to)
                ORDER BY o.id LIMIT p_limit) o)
        ) u
        ORDER BY u.id LIMIT p_limit
    ), known AS MATERIALIZED (
        SELECT d.topic, p.id AS topic_id, EXISTS (
            SELECT 1 FROM {schema}.routes r WHERE r.topic_id = p.id AND r.queue_id = p_queue OFFSET 0) AS wanted
        FROM (SELECT DISTINCT f.topic FROM fresh f) d
        LEFT JOIN LATERAL (
            SELECT p.id FROM {schema}.topics p
            WHERE p.topic = d.topic AND p.bindings_version = v_bus.bindings_version OFFSET 0) p ON true
    ), resolved AS MATERIALIZED (
        SELECT f.*, p.topic_id, p.wanted, bool_or(p.topic_id IS NULL) OVER (ORDER BY f.id ROWS UNBOUNDED PRECEDING)
            AS blocked
        FROM fresh f JOIN known p ON p.topic = f.topic
    ), copies AS MATERIALIZED (
        SELECT c.*, row_number() OVER (PARTITION BY c.lane ORDER BY c.id) AS n FROM (
            SELECT r.id, r.size, l.lane_from + {schema}.lane_of(l.kind, l.lanes, r.key, r.priority, r.id) AS lane
            FROM resolved r
            CROSS JOIN (
                SELECT l.lane_from, l.lanes, l.kind FROM {schema}.layouts l
                WHERE l.queue_id = p_queue ORDER BY l.lane_from DESC LIMIT 1) l
            WHERE r.wanted AND NOT r.blocked
              AND (NOT v_at.restored OR NOT {schema}.has_delivery(p_queue, r.id))
        ) c
    ), newest AS MATERIALIZED (
        SELECT q.lane, coalesce((
            SELECT d.seq FROM {schema}.deliveries d WHERE d.queue_id = p_queue AND d.lane = q.lane
            ORDER BY d.seq DESC LIMIT 1), (
            SELECT c.hi FROM {schema}.claims c WHERE c.queue_id = p_queue AND c.lane = q.lane
            ORDER BY c.lo DESC LIMIT 1), 0) AS seq
        FROM (SELECT DISTINCT c.lane FROM copies c) q
    ), appended AS (
        INSERT INTO {schema}.deliveries (queue_id, lane, seq, outbox_id, size)
        SELECT p_queue, c.lane, w.seq + c.n, c.id, c.size
        FROM copies c JOIN newest w ON w.lane = c.lane ORDER BY c.lane, c.n
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM fresh), (SELECT count(*) FROM resolved r WHERE NOT r.blocked),
           (SELECT max(r.id) FROM resolved r WHERE NOT r.blocked), (SELECT count(*) FROM appended),
           ARRAY(SELECT DISTINCT r.topic FROM resolved r WHERE r.topic_id IS NULL ORDER BY r.topic LIMIT 1000)
    INTO v_fresh, events, v_taken_upto, deliveries, unknown;

    IF deliveries > 0 THEN
        PERFORM pg_notify('{name}.work', p_queue::text) WHERE pg_notification_queue_usage() < 0.5;
    END IF;
    IF events = v_fresh AND v_fresh < p_limit THEN  -- nothing is left up to v_to
        IF v_open THEN
            state := {schema}.end_filling(p_queue);
            RETURN;
        END IF;
        v_at.snapshot := v_at.window_snapshot;
        v_at.next_xid := v_at.window_next_xid;
        v_at.ids_upto := v_at.window_ids_upto;
        v_at.window_snapshot := NULL;
        v_at.last_id := 0;
        IF t.window_snapshot IS NULL
           AND {schema}.is_same_position(v_at.snapshot, v_at.next_xid, v_at.ids_upto, t.snapshot, t.next_xid, t.ids_upto) THEN
            state := {schema}.end_filling(p_queue);
            RETURN;
        END IF;
    ELSE
        v_at.last_id := coalesce(v_taken_upto, v_at.last_id);
    END IF;
    UPDATE {schema}.fillings x SET
        snapshot = v_at.snapshot, next_xid = v_at.next_xid, ids_upto = v_at.ids_upto, window_snapshot = v_at.window_snapshot,
        window_next_xid = v_at.window_next_xid, window_ids_upto = v_at.window_ids_upto, last_id = v_at.last_id,
        deliveries = x.deliveries + fill.deliveries
    WHERE x.queue_id = p_queue;
    state := CASE WHEN events = 0 AND v_fresh > 0 THEN 'unknown' ELSE 'more' END;
END
$body$;

-- The queue has come as far as the relay, which from now on feeds it. Under the tick lock.
CREATE FUNCTION {schema}.end_filling(p_queue integer) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    UPDATE {schema}.queues q SET state = 'active' WHERE q.id = p_queue;
    DELETE FROM {schema}.fillings x WHERE x.queue_id = p_queue;
    RETURN 'filled';
END
$body$;
